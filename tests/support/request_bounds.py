"""The documented bounds of a request, implemented a second time in another way, to check fuzzed requests."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from baton.v1.generation_pb2 import GenerateRequest

_INTERVALS = {
    "temperature": (0.0, 2.0),
    "min_p": (0.0, 1.0),
    "top_n_sigma": (0.0, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "n": (1, 128),
    "best_of": (1, 128),
    "beam_width": (2, 8),
    "length_penalty": (-10.0, 10.0),
}
_OPEN_BELOW = {"top_p": 1.0, "repetition_penalty": 2.0}
_NOT_WITH_BEAMS = (
    *("temperature", "best_of", "top_p", "top_k", "min_p", "top_n_sigma", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "min_tokens", "logprobs", "prompt_logprobs", "json_schema"),
)


@dataclass(frozen=True, slots=True)
class Served:
    """The name and the sizes of the served model."""

    model: str
    vocab_size: int
    max_model_len: int


def wrong_fields(pb: GenerateRequest, served: Served) -> set[str]:
    """Return the fields of which the refusal may name any; empty if the request is valid. A letter is a token."""
    params = pb.sampling_params
    present = {field.name: value for field, value in params.ListFields()}
    wrong = _unknown_numbers(pb)
    wrong |= {name for name, (low, high) in _INTERVALS.items() if not low <= present.get(name, low) <= high}
    wrong |= {name for name, high in _OPEN_BELOW.items() if not 0.0 < present.get(name, high) <= high}
    wrong |= _wrong_ids(pb, present, served) | _wrong_texts(pb, served) | _wrong_lengths(pb, present, served)
    wrong |= _wrong_beams(present)
    for name, slo in (("ttft_slo_ms", "ttft_ms"), ("tpot_slo_ms", "tpot_ms")):
        level = {field.name: value for field, value in pb.service_level.ListFields()}
        wrong |= set() if 0.0 < level.get(slo, 1.0) < math.inf else {name}
    if pb.priority < 0:
        wrong.add("priority")
    if pb.ByteSize() > 2**20:
        wrong.add("request")
    return wrong


def _unknown_numbers(pb: GenerateRequest) -> set[str]:
    parts = {"": pb, "sampling_params.": pb.sampling_params, "service_level.": pb.service_level}
    if pb.HasField("token_ids"):
        parts["token_ids."] = pb.token_ids
    return {f"{path}{unknown.field_number}" for path, part in parts.items() for unknown in _unknown_fields(part)}


def _unknown_fields(part: Message) -> Iterator[Any]:
    fields: Any = UnknownFieldSet(part)  # the stubs do not know that it can be iterated
    return iter(fields)


def _wrong_ids(pb: GenerateRequest, present: dict[str, Any], served: Served) -> set[str]:
    vocab = range(served.vocab_size)
    wrong = set()
    if any(token not in vocab for token in pb.token_ids.ids):
        wrong.add("prompt")
    if present.get("top_k", -1) not in range(-1, served.vocab_size + 1):
        wrong.add("top_k")
    stops = pb.sampling_params.stop_token_ids
    if len(stops) > 256 or any(token not in vocab for token in stops):
        wrong.add("stop_token_ids")
    allowed = pb.sampling_params.allowed_token_ids
    if len(allowed) > 4096 or any(token not in vocab for token in allowed):
        wrong.add("allowed_token_ids")
    biases = pb.sampling_params.logit_bias
    if len(biases) > 300 or any(token not in vocab or not math.isfinite(bias) for token, bias in biases.items()):
        wrong.add("logit_bias")
    return wrong


def _wrong_texts(pb: GenerateRequest, served: Served) -> set[str]:
    wrong = set()
    if not re.fullmatch(r"[A-Za-z0-9_.:-]{0,64}", pb.request_id):
        wrong.add("request_id")
    if pb.model not in ("", served.model):
        wrong.add("model")
    if "\0" in pb.cache_salt or len(pb.cache_salt.encode()) > 256:
        wrong.add("cache_salt")
    stops = pb.sampling_params.stop
    if len(stops) > 16 or any(not 0 < len(stop.encode()) <= 256 or "\0" in stop for stop in stops):
        wrong.add("stop")
    words = pb.sampling_params.bad_words
    if len(words) > 256 or len("".join(words).encode()) > 4096 or any(not w.strip() or "\0" in w for w in words):
        wrong.add("bad_words")
    return wrong | _wrong_schema(pb)


def _wrong_schema(pb: GenerateRequest) -> set[str]:
    params = pb.sampling_params
    schema = params.json_schema
    wrong = {"json_schema"} if "\0" in schema or len(schema.encode()) > 2**16 else set()
    if schema:
        wrong |= {name for name in ("ignore_eos", "min_tokens") if getattr(params, name)}
        if max(params.n, params.best_of) > 8:
            wrong.add("n")
    return wrong


def num_prompt_tokens(pb: GenerateRequest) -> int:
    return len(pb.text or pb.token_ids.ids)


def _wrong_lengths(pb: GenerateRequest, present: dict[str, Any], served: Served) -> set[str]:
    wrong = set()
    num_prompt = num_prompt_tokens(pb)
    left = served.max_model_len - num_prompt
    if not num_prompt or left < 1:
        wrong.add("prompt")
    if not 1 <= present.get("max_tokens", 1) <= max(left, 1):
        wrong.add("max_tokens")
    if present.get("min_tokens", 0) > present.get("max_tokens", min(16, left)):
        wrong.add("min_tokens")
    if present.get("best_of", 128) < present.get("n", 1):
        wrong.add("best_of")
    return wrong


def _wrong_beams(present: dict[str, Any]) -> set[str]:
    width = present.get("beam_width")
    if width is None:
        return {"length_penalty", "early_stopping"} & set(present)
    wrong = {name for name in _NOT_WITH_BEAMS if name in present}
    if present.get("temperature") == 0.0:
        wrong.discard("temperature")
    wrong |= {name for name in ("stop", "logit_bias", "allowed_token_ids", "bad_words") if present.get(name)}
    if present.get("n", 1) > width:
        wrong.add("n")
    return wrong
