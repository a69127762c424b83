"""What `baton.runner.simulated.SimulatedRunner` must generate, computed without any engine and cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.engine.runner import KVLayout
from baton.engine.sequences.beams import BeamSearch
from baton.messages.pooling import PoolingParams
from baton.messages.sampling import SamplingParams, TokenLogprobs
from baton.runner.simulated import (
    ROOT,
    Bytes,
    embedding_of,
    head_rows,
    layout_of,
    likeliest_tokens,
    next_token,
    prompt_logprob,
    slot_of,
)
from baton.runner.spec import SimulatedSpec


def expected_kv(token_ids: Sequence[int], layout: KVLayout, adapter: str = "") -> Bytes:
    """KV of a whole sequence as uint8 [tokens, num_layers, 2, num_kv_heads, head bytes]."""
    rows = head_rows(layout)
    out = np.empty((len(token_ids), *rows), dtype=np.uint8)
    chain = ROOT
    for position, token_id in enumerate(token_ids):
        out[position] = slot_of(chain, token_id, position, rows, adapter)
        chain = out[position].tobytes()
    return out


def expected_tokens(prompt: Sequence[int], params: SamplingParams, spec: SimulatedSpec, adapter: str = "") -> list[int]:
    """What a request must generate: `max_tokens` tokens, or fewer when a stop id or the model's length ends it."""
    layout = layout_of(spec)
    stops = params.stops(spec.eos_token_ids)
    tokens, rows = list(prompt), head_rows(layout)
    kv = expected_kv(tokens, layout, adapter)
    output: list[int] = []
    while len(output) < params.max_tokens and len(tokens) < spec.max_model_len:
        token_id = next_token(kv, params, len(output), spec)
        output.append(token_id)
        if token_id in stops and len(output) > params.min_tokens:
            break
        slot = slot_of(kv[-1].tobytes(), token_id, len(tokens), rows, adapter)
        kv = np.concatenate((kv, slot[np.newaxis]))
        tokens.append(token_id)
    return output


def expected_embedding(
    prompt: Sequence[int], spec: SimulatedSpec, params: PoolingParams | None = None, adapter: str = ""
) -> bytes:
    """The embedding that a prompt must get, computed without any cache; by default that of its last token."""
    return embedding_of(expected_kv(prompt, layout_of(spec), adapter), params or PoolingParams())


def expected_prompt_logprobs(
    prompt: Sequence[int], top: int, spec: SimulatedSpec, adapter: str = ""
) -> list[TokenLogprobs]:
    """What a request must report of its prompt with `top` as `prompt_logprobs`."""
    kv = expected_kv(prompt, layout_of(spec), adapter)
    return [prompt_logprob(kv[:stop], prompt[stop], top, spec) for stop in range(1, len(prompt))]


def expected_beams(
    prompt: Sequence[int], search: BeamSearch, spec: SimulatedSpec, adapter: str = ""
) -> list[list[int]]:
    """The output tokens that a beam search must find, best sequence first."""
    layout = layout_of(spec)
    while not search.is_over:
        histories = [expected_kv([*prompt, *beam.token_ids], layout, adapter) for beam in search.running]
        search.advance([likeliest_tokens(kv, search.num_candidates, spec.vocab_size) for kv in histories])
    return [list(beam.token_ids) for beam in search.finished]
