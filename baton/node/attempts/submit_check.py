"""Checks a leg before it gets to the engine, and makes the engine's request of it.

Routers validate what clients send. This check protects all other requests from a router that did not: one value that
makes the runner raise fails the whole step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from baton.engine.request import Request
from baton.engine.sequences.beams import MAX_BEAMS, MIN_BEAMS
from baton.messages.adapters import is_adapter_digest
from baton.messages.ids import SCOPED_ID_PATTERN
from baton.messages.kv_cache import block_sizes_fit
from baton.messages.node import Leg, NodeDescription, Role, Submit
from baton.messages.node_model import Capability
from baton.messages.pooling import Pooling, PoolingParams
from baton.messages.prompt_rows import are_finite
from baton.messages.request_limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_AUDIO_BYTES,
    MAX_BAD_WORD_TOKENS,
    MAX_CHOICES,
    MAX_GRAMMAR_SEQUENCES,
    MAX_IMAGE_SPANS,
    MAX_IMAGES,
    MAX_LOGPROBS,
    MAX_SEQUENCES,
    MAX_SPANS,
)
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import CONSTRAINT_KINDS, NUMBER_RANGES, ConstraintKind, SamplingParams
from baton.messages.spans import ContentKind, EncoderContent, digest_of_rows, has_rows, source_spans
from baton.text.constraints.json_schemas import MAX_SCHEMA_BYTES

MAX_KV_BITS = 64
"""The most characters of `Submit.kv_bits`, which is part of keys of blocks."""


def objection(submit: Submit, node: NodeDescription) -> str | None:
    """Why this node can't run the leg, beginning with the field's name; None when it can."""
    spec, vocab = submit.spec, node.vocab_size
    ids = spec.prompt_token_ids
    if not SCOPED_ID_PATTERN.match(submit.attempt.request_id):
        return "request_id: is not a valid request id"
    if not ids:
        return "prompt: is empty"
    if min(ids) < 0 or max(ids) >= vocab:
        return f"prompt: has a token id outside of [0, {vocab})"
    if node.role is Role.ENCODE or (submit.leg is Leg.PREFILL and node.role is not Role.PREFILL):
        return f"leg: a {node.role.value} node does not run {submit.leg.value} legs"
    source, is_embed = submit.kv_source, submit.leg is Leg.EMBED
    needed = spec.pooling.needs if spec.pooling else Capability.EMBED if is_embed else Capability.GENERATE
    if needed not in node.can and (is_embed or not spec.contents):
        return f"leg: the model of {node.node_id} can't {needed}"
    if is_embed and (why := _embedding_objection(submit, node)):
        return why
    if spec.pooling is not None and not is_embed:
        return "pooling: is of an embedding leg"
    if (submit.leg is Leg.DECODE) != (source is not None):
        return "kv_source: must be set for a decode leg, and for no other leg"
    if source is not None and not (source.node_id and source.incarnation and source.address):
        return "kv_source: must have node id, incarnation and address"
    reader = submit.reader_block_size
    if reader and not (submit.leg is Leg.PREFILL and block_sizes_fit(reader, node.block_size)):
        return f"reader_block_size: {reader} does not fit this node's {node.block_size}, or the leg is not read"
    num_tokens, most = submit.num_tokens, min(node.max_model_len, len(ids) + spec.sampling_params.max_tokens)
    if submit.cut_by and not (
        submit.leg is Leg.DECODE and submit.output_token_ids and num_tokens < submit.cut_by <= most
    ):
        return f"cut_by: must be {num_tokens + 1} to {most}, for a decode leg that continues an output, or missing"
    if len(submit.kv_bits) > MAX_KV_BITS or (submit.kv_bits and submit.leg is not Leg.DECODE):
        return f"kv_bits: must have at most {MAX_KV_BITS} characters, for a decode leg, or be missing"
    if submit.turn is not None and not math.isfinite(submit.turn):
        return "turn: must be a finite number of seconds"
    if spec.adapter and not is_adapter_digest(spec.adapter):
        return "adapter: must be the digest of an adapter"
    return (
        _sampling_objection(spec.sampling_params, vocab)
        or _output_objection(submit, node)
        or (_span_objection(spec, node) if spec.spans or spec.contents else None)
    )


def _embedding_objection(submit: Submit, node: NodeDescription) -> str | None:
    params = submit.spec.sampling_params
    if submit.output_token_ids or params.n > 1 or params.beam_width or params.has_grammar:
        return "leg: a request for an embedding can have no output, schema or several sequences"
    pooling = submit.spec.pooling or PoolingParams()
    if not 0 <= pooling.dimensions <= node.embedding_size:
        return f"dimensions: must be 1 to {node.embedding_size}"
    if not 0 <= pooling.second_start <= len(submit.spec.prompt_token_ids):
        return "second_start: is behind the prompt"
    return _alignment_objection(pooling, submit.spec) if pooling.kind is Pooling.ALIGN else None


def _alignment_objection(pooling: PoolingParams, spec: RequestSpec) -> str | None:
    """Why a transcript can't be aligned with its recording; None if it can. The spans themselves are checked later."""
    if not spec.spans or any(content.kind is not ContentKind.SPEECH for content in spec.contents):
        return "contents: an alignment needs the speech of its transcript"
    if pooling.second_start <= spec.spans[-1].stop:
        return "second_start: leaves no token before the transcript"
    if not 1 <= pooling.num_rows <= spec.spans[0].length:
        return f"num_rows: must be 1 to {spec.spans[0].length}"
    return None


def _span_objection(spec: RequestSpec, node: NodeDescription) -> str | None:
    """Why the spans of the prompt can't be computed; None if they can."""
    num_given = sum([not span.is_encoded for span in spec.spans])
    if num_given and Capability.PROMPT_EMBEDS not in node.can:
        return f"spans: the model of {node.node_id} can't {Capability.PROMPT_EMBEDS}"
    if num_given > MAX_SPANS:
        return f"spans: there are {num_given}; at most {MAX_SPANS} are taken"
    if wrong := _content_objection(spec, node):
        return wrong
    if spec.sampling_params.prompt_logprobs is not None:
        return "spans: go with no prompt_logprobs"
    ids, width, stop = spec.prompt_token_ids, node.row_width, 0
    for span in spec.spans:
        if not stop <= span.start < span.stop <= len(ids):
            return f"spans: {span.start} to {span.stop} is not behind {stop} in a prompt of {len(ids)}"
        stop = span.stop
        if any(ids[span.start : span.stop]):
            return f"spans: there are tokens at the positions of the one from {span.start} on"
        if span.is_encoded:
            continue
        if not has_rows(span, width):
            return f"spans: {len(span.rows)} bytes are not {span.length} rows of {width} numbers of {span.dtype:.20}"
        if not are_finite(span.dtype, span.rows):
            return "spans: have numbers that are not finite"
        # Blocks are found by digests: a wrong one would give others this prompt's keys and values.
        if span.digest != digest_of_rows(span.dtype, span.length, width, span.rows):
            return f"spans: the digest of the one from {span.start} on is not that of its rows"
    return None


def _content_objection(spec: RequestSpec, node: NodeDescription) -> str | None:
    """Why what an encoder makes rows of, and the spans that have them, can't be computed; None if they can."""
    encoded = [span for span in spec.spans if span.is_encoded]
    if not encoded and not spec.contents:
        return None
    for content in spec.contents:
        for needed in content.kind.needs - node.can:
            return f"contents: the model of {node.node_id} can't {needed}"
    if len(encoded) > MAX_IMAGE_SPANS or len(spec.contents) > MAX_IMAGES:
        num_contents = len(spec.contents)
        return f"contents: there are {num_contents} in {len(encoded)} spans; {MAX_IMAGES} in {MAX_IMAGE_SPANS} go"
    # Rows are kept, and blocks found, by digests: a wrong one would give others this content's.
    if any(content.digest != EncoderContent.of(content.data, content.kind).digest for content in spec.contents):
        return "contents: the digest of one is not that of its data"
    here = {content.digest for content in spec.contents}
    digest, num_rows = "", 0
    for span in encoded:
        goes_on = span.digest == digest and span.first_row == num_rows
        if span.digest not in here or span.rows or not (goes_on or span.first_row == 0):
            return f"contents: the span from {span.start} on has no row of one that begins or goes on there"
        if span.columns and (span.length % span.columns or span.first_row):
            return f"contents: the {span.length} positions from {span.start} on are no grid of {span.columns} columns"
        digest, num_rows = span.digest, span.first_row + span.length
    first = spec.contents[0]
    if all(content.kind is ContentKind.IMAGE for content in spec.contents):
        return None
    if len(spec.contents) > 1:
        return f"contents: there are {len(spec.contents)}; {first.kind.value} goes alone"
    if first.kind is ContentKind.SPEECH and len(first.data) > MAX_AUDIO_BYTES:
        return f"contents: {len(first.data)} bytes of speech; at most {MAX_AUDIO_BYTES} are taken"
    # The keys of blocks name the content, not how many of a span's positions have rows of it.
    num_rows = len(first.data) // 4 if first.kind is ContentKind.TEXT else sum([part.length for part in encoded[:1]])
    if not num_rows or tuple(spec.spans) != source_spans(first.digest, num_rows):
        return f"contents: the spans are not those of {num_rows} rows at the beginning of a prompt"
    if spec.spans[-1].stop >= len(spec.prompt_token_ids):
        return "prompt: has no token for the decoder"
    return None


def _output_objection(submit: Submit, node: NodeDescription) -> str | None:
    """Why the output of an earlier attempt can't be continued; None if it can."""
    ids, params = submit.output_token_ids, submit.spec.sampling_params
    if not ids:
        return None
    if params.n > 1 or params.beam_width:
        return "output_token_ids: can be set for a single sequence only"
    if min(ids) < 0 or max(ids) >= node.vocab_size:
        return f"output_token_ids: has a token id outside of [0, {node.vocab_size})"
    stops = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | node.eos_token_ids
    for index, token_id in enumerate(ids):
        if index + 1 >= params.min_tokens and token_id in stops:
            return f"output_token_ids: token {index} ended the output"
    most = min(params.max_tokens, node.max_model_len - len(submit.spec.prompt_token_ids))
    return f"output_token_ids: {len(ids)} tokens leave nothing to generate" if len(ids) >= most else None


def _sampling_objection(params: SamplingParams, vocab_size: int) -> str | None:
    sound: dict[str, bool] = {
        **{name: getattr(params, name) in allowed for name, allowed in NUMBER_RANGES.items()},
        "max_tokens": params.max_tokens >= 1,
        "min_tokens": params.min_tokens >= 0,
        "top_k": params.top_k >= -1,
        "logit_bias": all(0 <= k < vocab_size and math.isfinite(v) for k, v in params.logit_bias.items()),
        "allowed_token_ids": len(params.allowed_token_ids) <= MAX_ALLOWED_TOKEN_IDS
        and all(0 <= token_id < vocab_size for token_id in params.allowed_token_ids),
        "bad_words_token_ids": sum(map(len, params.bad_words_token_ids)) <= MAX_BAD_WORD_TOKENS
        and all(word and min(word) >= 0 and max(word) < vocab_size for word in params.bad_words_token_ids),
        "n": 1 <= params.n <= (params.beam_width or (MAX_GRAMMAR_SEQUENCES if params.has_grammar else MAX_SEQUENCES)),
        "beam_width": params.beam_width == 0 or MIN_BEAMS <= params.beam_width <= MAX_BEAMS,
        "logprobs": params.logprobs is None or 0 <= params.logprobs <= vocab_size,
        "prompt_logprobs": params.prompt_logprobs is None
        or (0 <= params.prompt_logprobs <= MAX_LOGPROBS and not params.beam_width),
        "repetition_detection": params.repetition_detection is None
        or (params.repetition_detection.is_sound and not params.beam_width),
        **{kind: _is_sound_constraint(params, kind) for kind in CONSTRAINT_KINDS},
    }
    bad = [name for name, is_sound in sound.items() if not is_sound]
    return f"{bad[0]}: {getattr(params, bad[0])!r} is out of bounds"[:200] if bad else None


def _is_sound_constraint(params: SamplingParams, kind: ConstraintKind) -> bool:
    """Whether a constraint is missing, or is the only one, not too large, and not of a beam search."""
    value: str | Sequence[str] = getattr(params, kind)
    if not value:
        return True
    is_only = params.constraint_kind == kind and not params.beam_width
    num_chars = len(value) if isinstance(value, str) else sum(map(len, value))
    return is_only and num_chars <= MAX_SCHEMA_BYTES and (isinstance(value, str) or len(value) <= MAX_CHOICES)


def engine_request(submit: Submit, eos_token_ids: frozenset[int], client_index: int = 0) -> Request:
    """The leg as a request to the engine. `client_index`: whose outputs its outputs are among."""
    return Request(
        str(submit.attempt),
        submit.spec,
        eos_token_ids=eos_token_ids,
        client_index=client_index,
        leg=submit.leg,
        kv_source=submit.kv_source,
        output_token_ids=submit.output_token_ids,
        reader_block_size=submit.reader_block_size,
        attempt=submit.attempt,
        turn_in_s=submit.turn or 0.0,
        held_prefix=submit.held_prefix,
        cut_by=submit.cut_by,
        kv_bits=submit.kv_bits,
    )
