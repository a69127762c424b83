"""What the host does for a GPU today, sampling from logits that were moved to it; and digests of blocks in VRAM."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median

import torch

from baton.engine.runner import KVLayout, KVMemory
from baton.messages.sampling import SamplingParams
from baton.runner.blocks.block_digests import block_digests
from baton.runner.execution.sampler import SamplingState, sample
from baton.runner.model.cached_model import on_host
from gpu.made_model import BLOCK_SIZE, DTYPES
from gpu.room import device_of, has_room
from gpu.shapes import LLAMA_1B, TINY, fill_by_counter
from gpu.stage import StageContext

_GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
_SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=64)
KINDS = {
    "greedy": _GREEDY,
    "greedy, 5 log-probabilities": replace(_GREEDY, logprobs=5),
    "temperature": _SAMPLED,
    "temperature, top_k 50": replace(_SAMPLED, top_k=50),
    "temperature, top_p 0.95": replace(_SAMPLED, top_p=0.95),
    "temperature, top_p 0.95, repetition_penalty": replace(_SAMPLED, top_p=0.95, repetition_penalty=1.1),
}
_PROMPT = list(range(64))
_DEVIATION = 3.0
_NUM_LIKELY, _LIKELIER = 8, 15.0
"""In peaked logits so many tokens are so much likelier that they have nearly all probability; in flat ones the largest
share is spread over thousands."""


def measure_sampler(context: StageContext) -> None:
    """Report how long logits take to the host, and what a row costs there by its kind."""
    rows, vocab = (2, TINY.vocab) if context.tiny else (16, LLAMA_1B.vocab)
    for many in (rows,) if context.tiny else (rows, 128):
        if not has_room(context, f"logits of {many}", num_bytes=16 * many * vocab, seconds=1):
            continue
        logits = _logits(context, many, vocab, peaked=False)
        seconds = _seconds(context, lambda logits=logits: on_host(logits, copy=True))
        gigabytes = 4e-9 * many * vocab
        context.report("logits to the host", rows=many, vocab=vocab, ms=seconds * 1e3, gb_per_s=gigabytes / seconds)
    for peaked in (True, False):
        logits = _logits(context, rows, vocab, peaked=peaked)
        here = on_host(logits, copy=True)
        for kind, params in KINDS.items():
            if not has_room(context, f"sampler, {kind}", seconds=2):
                continue
            states = [SamplingState(params, _PROMPT, len(_PROMPT) - 8, frozenset())] * rows
            seconds = _seconds(context, lambda here=here, states=states: sample(here, states))
            context.report(
                "sampler", kind=kind, logits="peaked" if peaked else "flat", vocab=vocab, ms_a_row=seconds / rows * 1e3
            )


def _logits(context: StageContext, rows: int, vocab: int, *, peaked: bool) -> torch.Tensor:
    """Normally distributed logits; the likely tokens are spread over the vocabulary."""
    device = device_of(context)
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator, device=device) * _DEVIATION
    if peaked:
        logits[:, :: vocab // _NUM_LIKELY] += _LIKELIER
    return logits


def measure_digests(context: StageContext) -> None:
    """Report bytes a second of digests of blocks in VRAM: by the kernel on a GPU, by copies elsewhere."""
    shape, num_blocks = (TINY, 8) if context.tiny else (LLAMA_1B, 1024)
    device = device_of(context)
    dtype = DTYPES[device.type]
    name = str(dtype).removeprefix("torch.")
    layout = KVLayout.uniform(BLOCK_SIZE, shape.layers, shape.kv_heads, shape.head_dim, name)
    if not has_room(context, "digests", num_bytes=num_blocks * layout.block_bytes, seconds=3):
        return
    owner = torch.empty(num_blocks * layout.block_elements, dtype=dtype, device=device)
    fill_by_counter(owner, "cache", deviation=1.0)
    # VRAM also on a CPU, so that the blocks take the same way there.
    memory = KVMemory(owner.data_ptr(), num_blocks, layout.block_bytes, "VRAM", device.index or 0, owner, layout=layout)
    digests = block_digests(memory)
    for asked in sorted({1, num_blocks // 4, num_blocks}):
        ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))[:asked].tolist()
        seconds = _seconds(context, lambda ids=ids: digests(ids))
        size = asked * layout.block_bytes
        context.report("digests", blocks=asked, bytes=size, ms=seconds * 1e3, gb_per_s=size / seconds / 1e9)
    alone = digests([0, 1])
    context.check("digests don't depend on their mates", digests([1, 0]) == [alone[1], alone[0]])


def _seconds(context: StageContext, call: object) -> float:
    """The median of a few calls of what the host does, which ends when the call returns."""
    assert callable(call)
    call()
    taken = []
    for _ in range(2 if context.tiny else 5):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return median(taken)
