"""Fuzzed gRPC requests, sent to a whole cluster in virtual time: from their bytes to the nodes and back.

Each is answered with the status that follows from the documented bounds, which `request_bounds` states a second time.
It leaves no state, and a request beside it gets its own tokens. `BATON_FUZZ_EXAMPLES=100000` runs that many.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from baton.messages.sampling import SamplingParams
from baton.v1 import generation_pb2 as pb
from tests.support.fuzzed_cluster import SERVED, SPEC, LetterTokenizer, Run, events_of, fuzzed_cluster, tokens_of
from tests.support.local_rpc import Reply
from tests.support.mutations import mutated
from tests.support.request_bounds import num_prompt_tokens, wrong_fields
from tests.support.simulated_oracle import expected_tokens

EXAMPLES = int(os.environ.get("BATON_FUZZ_EXAMPLES", "200"))


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with fuzzed_cluster() as made:
        yield made


# The fields of a request: for each of them valid values, then others.

WILD_DOUBLES = st.one_of(
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e308, 5e-324, -5e-324, 2.0000000001, -2.1, 1.5]),
    st.floats(),
)
UINT32 = st.one_of(st.sampled_from([0, 1, 2, 8, 9, 16, 21, 127, 128, 2**31 - 1, 2**31, 2**32 - 1]), st.integers(0, 99))
TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["\0", "a\0b", "\u202e", "é" * 128, "é" * 129, "x" * 256, "x" * 257, "\U0001f600" * 65]),
)
GOOD_IDS = st.lists(st.integers(0, SPEC.vocab_size - 1), min_size=1, max_size=20)
WILD_IDS = st.one_of(
    st.lists(UINT32, max_size=6),
    st.sampled_from([[], [1] * 126, [1] * 127, [1] * 128, [0] * 5000, [SPEC.vocab_size], [2**32 - 1]]),
)
PARAMS: dict[str, tuple[st.SearchStrategy[Any], st.SearchStrategy[Any]]] = {
    "temperature": (st.sampled_from([0.0, 0.5, 2.0]), WILD_DOUBLES),
    "top_p": (st.sampled_from([5e-324, 0.5, 1.0]), WILD_DOUBLES),
    "top_k": (
        st.sampled_from([-1, 1, SPEC.vocab_size]),
        st.sampled_from([0, -2, 98, -(2**31), 2**31 - 1]),
    ),
    "min_p": (st.sampled_from([0.0, 0.1, 1.0]), WILD_DOUBLES),
    "top_n_sigma": (st.sampled_from([0.0, 0.5, 100.0]), WILD_DOUBLES),
    "seed": (st.integers(0, 2**64 - 1), st.sampled_from([0, 2**63, 2**64 - 1])),
    "presence_penalty": (st.sampled_from([-2.0, 0.0, 2.0]), WILD_DOUBLES),
    "frequency_penalty": (st.sampled_from([-2.0, 0.0, 2.0]), WILD_DOUBLES),
    "repetition_penalty": (st.sampled_from([5e-324, 1.0, 2.0]), WILD_DOUBLES),
    "logit_bias": (
        st.dictionaries(st.integers(0, 96), st.floats(-100, 100), max_size=3),
        st.one_of(
            st.dictionaries(UINT32, WILD_DOUBLES, max_size=3),
            st.just(dict.fromkeys(range(301), 0.5)),
        ),
    ),
    "allowed_token_ids": (
        st.lists(st.integers(0, 96), max_size=3),
        st.one_of(st.lists(UINT32, max_size=3), st.just([1] * 4097)),
    ),
    "bad_words": (
        st.lists(st.text(min_size=1, max_size=3).filter(lambda text: "\0" not in text and text.strip()), max_size=3),
        st.sampled_from([["x"] * 257, [""], [" "], ["x" * 4097], ["\0"]]),
    ),
    "prompt_logprobs": (st.integers(0, 20), UINT32),
    "max_tokens": (st.integers(1, 24), UINT32),
    "min_tokens": (st.integers(0, 3), UINT32),
    "stop": (
        st.lists(st.text(min_size=1, max_size=3).filter(lambda text: "\0" not in text), max_size=3),
        st.one_of(st.lists(TEXTS, max_size=3), st.sampled_from([["x"] * 16, ["x"] * 17, [""]])),
    ),
    "stop_token_ids": (
        st.lists(st.integers(0, 96), max_size=3),
        st.one_of(st.lists(UINT32, max_size=3), st.sampled_from([[1] * 256, [1] * 257])),
    ),
    "ignore_eos": (st.booleans(), st.booleans()),
    "include_stop_str_in_output": (st.booleans(), st.booleans()),
    "logprobs": (st.integers(0, 20), UINT32),
    "n": (st.integers(1, 3), UINT32),
    "best_of": (st.integers(3, 4), UINT32),
    "beam_width": (st.integers(3, 4), UINT32),
    "length_penalty": (st.sampled_from([-10.0, 1.0, 10.0]), WILD_DOUBLES),
    "early_stopping": (st.booleans(), st.booleans()),
    "json_schema": (st.just(""), st.sampled_from(["\0", "{}" + " " * 2**16])),
}
FIELDS: dict[str, tuple[st.SearchStrategy[Any], st.SearchStrategy[Any]]] = {
    "request_id": (st.from_regex(r"[A-Za-z0-9_.:-]{0,64}", fullmatch=True), TEXTS),
    "model": (st.sampled_from(["", SPEC.name]), TEXTS),
    "priority": (st.sampled_from([0, 2**31 - 1]), st.integers(-(2**31), 2**31 - 1)),
    "cache_salt": (st.text(max_size=4).filter(lambda text: "\0" not in text), TEXTS),
    "ttft_ms": (st.sampled_from([1e6, 1e300]), WILD_DOUBLES),
    "tpot_ms": (st.sampled_from([1e6, 1e300]), WILD_DOUBLES),
}
BEAMS = {"beam_width", "length_penalty", "early_stopping"}
GOES_WITH_BEAMS = BEAMS | {"max_tokens", "seed", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"}


@st.composite
def requests(draw: st.DrawFn, wild: bool) -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    params = draw(st.sets(st.sampled_from(sorted(set(PARAMS) - BEAMS)), max_size=6))
    if draw(st.integers(0, 5)) == 0:
        params = {name for name in params if name in GOES_WITH_BEAMS} | {"beam_width"}
    if wild:
        params |= draw(st.sets(st.sampled_from(sorted(PARAMS)), max_size=2))
    fields = draw(st.sets(st.sampled_from(sorted(FIELDS)), max_size=3))
    names = [*sorted(params), *sorted(fields), "prompt"]
    spoilt = draw(st.sets(st.sampled_from(names), min_size=1, max_size=3)) if wild else set()
    for name in names:
        _set(draw, request, name, name in spoilt)
    return request


def _set(draw: st.DrawFn, request: pb.GenerateRequest, name: str, is_spoilt: bool) -> None:
    if name == "prompt":
        kind = draw(st.sampled_from(["text", "ids", "none" if is_spoilt else "ids"]))
        if kind == "text":
            texts = st.sampled_from(["", "\0", "x" * 127, "x" * 128, "é" * 300, "x" * (2**20 + 1)])
            letters = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
            request.text = draw(texts if is_spoilt else letters)
        elif kind == "ids":
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(draw(WILD_IDS if is_spoilt else GOOD_IDS))
        return
    good, wild = PARAMS.get(name) or FIELDS[name]
    value = draw(wild if is_spoilt else good)
    if name in PARAMS:
        target: Any = request.sampling_params
    else:
        target = request.service_level if name in ("ttft_ms", "tpot_ms") else request
    if isinstance(value, dict):
        getattr(target, name).update(value)
    elif isinstance(value, list):
        getattr(target, name).extend(value)
    else:
        setattr(target, name, value)


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """The bytes of a valid request with a few of them changed, removed, repeated or inserted."""
    return mutated(draw, draw(requests(wild=False)).SerializeToString(), 8, st.binary(max_size=8))


WIRE = st.one_of(
    requests(wild=False).map(lambda request: request.SerializeToString()),
    requests(wild=True).map(lambda request: request.SerializeToString()),
    mutations(),
    st.binary(max_size=40),
)
fuzzed = settings(
    max_examples=EXAMPLES,
    database=None,
    derandomize=EXAMPLES <= 500,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


@fuzzed
@given(
    data=WIRE,
    timeout_s=st.sampled_from([None, None, None, None, None, 0.0, 1e-9, 0.03, 1e9]),
    leave_after=st.sampled_from([None, None, None, None, 1, 3]),
)
def test_every_request_gets_an_answer(run: Run, data: bytes, timeout_s: float | None, leave_after: int | None) -> None:
    try:
        request = pb.GenerateRequest.FromString(data)
        wrong = wrong_fields(request, SERVED)
        # Bounds do not decide whether a schema can be served.
        assume(wrong or not request.sampling_params.json_schema)
    except DecodeError:
        request, wrong = pb.GenerateRequest(), {"request"}
    reply = run(lambda cluster: cluster.call("Generate", data, timeout_s=timeout_s, leave_after=leave_after))
    event(reply.code)
    if wrong:
        assert reply.code == "INVALID_ARGUMENT", (reply, wrong)
        assert reply.fields <= wrong, (reply.details, wrong)
        assert not reply.messages
    elif reply.code == "OK":
        assert_right(request, reply, is_whole=leave_after is None)
    else:
        allowed = {"DEADLINE_EXCEEDED"} if timeout_s is not None and timeout_s < 1 else set()
        if request.HasField("service_level") and request.service_level.ttft_ms < 1e4:
            allowed.add("UNAVAILABLE")
        assert reply.code in allowed, reply


def assert_right(request: pb.GenerateRequest, reply: Reply, *, is_whole: bool) -> None:
    events, params = events_of(reply), request.sampling_params
    assert events[0].WhichOneof("event") == "accepted"
    assert events[0].accepted.prompt_tokens == num_prompt_tokens(request)
    for index in range(8):
        chunks = [event.chunk for event in events if event.HasField("chunk") and event.chunk.sequence_index == index]
        firsts = [chunk.first_index for chunk in chunks]
        assert firsts == [sum(len(chunk.token_ids) for chunk in chunks[:place]) for place in range(len(chunks))]
    if not is_whole:
        return
    assert events[-1].WhichOneof("event") == "finished"
    assert sum(event.HasField("sequence_finished") for event in events) == (params.n if params.n > 1 else 0)
    if params.HasField("beam_width") or params.n > 1 or params.best_of > 1:
        return
    whole = expected_tokens(prompt_of(request), sampling_of(request, events[0].accepted.seed), SPEC)
    tokens = tokens_of(events)
    assert tokens == whole[: len(tokens)]
    assert len(tokens) == len(whole) or events[-1].finished.WhichOneof("stop_reason") == "stop_string"


def prompt_of(request: pb.GenerateRequest) -> list[int]:
    return LetterTokenizer().encode(request.text) if request.text else list(request.token_ids.ids)


def sampling_of(request: pb.GenerateRequest, seed: int) -> SamplingParams:
    """The fields that decide the tokens of a simulated node."""
    params = request.sampling_params
    left = SPEC.max_model_len - num_prompt_tokens(request)
    return SamplingParams(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        seed=seed,
        max_tokens=params.max_tokens or min(16, left),
        min_tokens=params.min_tokens,
        stop_token_ids=frozenset(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
    )


QUESTIONS = st.one_of(
    st.builds(lambda i: ("Cancel", pb.CancelRequest(request_id=i)), TEXTS),
    st.builds(
        lambda i, at: ("Resume", pb.ResumeRequest(request_id=i, next_token_index=at)),
        TEXTS,
        st.lists(UINT32, max_size=9),
    ),
    st.builds(lambda m, t: ("Tokenize", pb.TokenizeRequest(model=m, text=t)), st.sampled_from(["", "x"]), TEXTS),
    st.builds(
        lambda m, ids: ("Detokenize", pb.DetokenizeRequest(model=m, token_ids=ids)),
        st.sampled_from(["", SPEC.name, "é"]),
        st.one_of(WILD_IDS, GOOD_IDS),
    ),
    st.just(("ListModels", pb.ListModelsRequest())),
)
ANSWERS = {
    "Cancel": {"NOT_FOUND"},
    "Resume": {"NOT_FOUND", "INVALID_ARGUMENT"},
    "Tokenize": {"OK", "INVALID_ARGUMENT"},
    "Detokenize": {"OK", "INVALID_ARGUMENT"},
    "ListModels": {"OK"},
}


@settings(fuzzed, max_examples=max(50, EXAMPLES // 10))
@given(question=QUESTIONS, tail=st.one_of(st.just(b""), st.just(b""), st.binary(max_size=6)))
def test_every_other_call_gets_an_answer(run: Run, question: tuple[str, Any], tail: bytes) -> None:
    method, request = question
    reply = run(lambda cluster: cluster.call(method, request.SerializeToString() + tail))
    if tail:
        assert reply.code in ANSWERS[method] | {"INVALID_ARGUMENT"}, reply
        return
    assert reply.code in ANSWERS[method], reply
    if method == "Tokenize":
        assert (reply.code == "OK") == (request.model == ""), reply
    if method == "Detokenize":
        is_good = request.model != "é" and all(token < SPEC.vocab_size for token in request.token_ids)
        assert (reply.code == "OK") == is_good, reply
