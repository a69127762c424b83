"""Requests that nobody would write, to a whole cluster in virtual time: from their bytes to the nodes and back.

Each is answered with the status that the documented bounds give it, written a second time in `request_bounds`; nothing
of it is left anywhere, and a request alongside gets its own tokens. `BATON_FUZZ_EXAMPLES=100000` runs so many.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from baton.engine.request import SamplingParams
from baton.engine.runner.simulated import expected_tokens
from baton.rpc.generation_service import SERVICE_NAME, GenerationServicer
from baton.rpc.messages import ModelCard
from baton.v1 import generation_pb2 as pb
from kv_transfer.backends.faulty import Faults
from router.dispatcher import Dispatcher, DispatchLimits
from router.front import GenerationHandler
from router.timers import LoopTimers, TimerHandle
from tests.support.local_rpc import LocalServer, Reply
from tests.support.request_bounds import Served, num_prompt_tokens, wrong_fields
from tests.support.simulated_cluster import SimulatedCluster, SimulatedLimits
from tests.support.virtual_time import VirtualTimeLoop

EXAMPLES = int(os.environ.get("BATON_FUZZ_EXAMPLES", "500"))
LIMITS = SimulatedLimits(num_blocks=192, chunk=256, max_num_seqs=16, digests=False)
SPEC = LIMITS.spec
SERVED = Served(SPEC.name, SPEC.vocab_size, SPEC.max_model_len)
CANARY = pb.GenerateRequest(token_ids={"ids": [5, 6, 7, 8, 9]}, sampling_params={"seed": 3, "max_tokens": 6})
CANARY_TOKENS = expected_tokens([5, 6, 7, 8, 9], SamplingParams(temperature=1.0, seed=3, max_tokens=6), SPEC)
PATIENCE_S = 600.0
"""In virtual time: as good as for ever."""


class Letters:
    """A token for each letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % SPEC.vocab_size for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(32 + token) for token in token_ids)

    def detokenizer(self) -> Letters:
        return self

    def push(self, token_id: int) -> str:
        return chr(32 + token_id)

    def finish(self) -> str:
        return ""


class CountedTimers(LoopTimers):
    """Knows which callbacks are yet to come."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[asyncio.TimerHandle] = []

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        handle = super().call_at(when, callback)
        assert isinstance(handle, asyncio.TimerHandle)
        self._made.append(handle)
        return handle

    def pending(self) -> int:
        now = self.monotonic()
        self._made = [handle for handle in self._made if not handle.cancelled() and handle.when() > now]
        return len(self._made)


class FuzzedCluster:
    """A cluster that outlives its requests, and the door that they come to."""

    def __init__(self) -> None:
        self.cluster = SimulatedCluster(LIMITS, Random(1), Faults)
        self.timers = CountedTimers()
        cluster, codec = self.cluster, Letters()

        def card() -> ModelCard:
            return ModelCard(SPEC.name, SPEC.max_model_len, SPEC.vocab_size)

        limits = DispatchLimits(thread_text_chars=200)
        self.dispatcher = Dispatcher(cluster.view, cluster._links, codec, card, self.timers, Random(2), limits)
        cluster.dispatcher = self.dispatcher
        self.server = LocalServer()
        handler = GenerationHandler(self.dispatcher, codec, card)
        GenerationServicer(handler).add_to_server(self.server)  # type: ignore[arg-type]

    async def start(self) -> None:
        for name in ("prefill-0", "decode-0"):
            await self.cluster.start(name)
        await self.cluster.whole()
        # The nodes' link stays once it is open.
        await self.call("Generate", CANARY.SerializeToString())
        await asyncio.sleep(1.0)
        self._tasks = kinds_of_tasks()

    async def call(self, method: str, request: bytes, **how: Any) -> Reply:
        async with asyncio.timeout(PATIENCE_S):
            return await self.server.call(f"/{SERVICE_NAME}/{method}", request, **how)

    async def beside_a_canary(self, method: str, request: bytes, **how: Any) -> Reply:
        """The answer; afterwards nothing of it is left, and who came at the same time has noticed nothing."""
        canary = asyncio.create_task(self.call("Generate", CANARY.SerializeToString()))
        reply = await self.call(method, request, **how)
        unharmed = await canary
        assert unharmed.code == "OK", unharmed
        assert tokens_of(events_of(unharmed)) == CANARY_TOKENS
        await self._assert_nothing_is_left()
        return reply

    async def _assert_nothing_is_left(self) -> None:
        assert (self.dispatcher.num_live, self.dispatcher.num_waiting, self.dispatcher.num_placed) == (0, 0, 0)
        assert self.timers.pending() == 0
        await self.cluster.idle(PATIENCE_S)
        for node in self.cluster.nodes.values():
            node.assert_nothing_is_left()
        left = kinds_of_tasks() - self._tasks
        assert not left, left


def kinds_of_tasks() -> Counter[str]:
    others = asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]
    return Counter(str(task.get_coro().__qualname__) for task in others)  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., Reply]]:
    """Runs one call beside a canary."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:

        async def start() -> FuzzedCluster:
            cluster = FuzzedCluster()
            await cluster.start()
            return cluster

        cluster = runner.run(start())
        yield lambda *call, **how: runner.run(cluster.beside_a_canary(*call, **how))
        runner.run(cluster.cluster.close())


def events_of(reply: Reply) -> list[pb.GenerateResponse]:
    return [pb.GenerateResponse.FromString(message) for message in reply.messages]


def tokens_of(events: Sequence[pb.GenerateResponse], sequence_index: int = 0) -> list[int]:
    chunks = [event.chunk for event in events if event.HasField("chunk")]
    return [token for chunk in chunks if chunk.sequence_index == sequence_index for token in chunk.token_ids]


# What a request is made of: for each field good values, then others.

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
    "priority": (st.sampled_from([0, -(2**31), 2**31 - 1]), st.integers(-(2**31), 2**31 - 1)),
    "cache_salt": (st.text(max_size=4).filter(lambda text: "\0" not in text), TEXTS),
    "ttft_ms": (st.sampled_from([1e6, 1e300]), WILD_DOUBLES),
    "tpot_ms": (st.sampled_from([1e6, 1e300]), WILD_DOUBLES),
}
BEAMS = {"beam_width", "length_penalty", "early_stopping"}
GOES_WITH_BEAMS = BEAMS | {"max_tokens", "seed", "stop_token_ids", "ignore_eos"}


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
            letters = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
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
    """A good request's bytes with a few of them changed, cut out, repeated or put in."""
    data = bytearray(draw(requests(wild=False)).SerializeToString())
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        size = draw(st.integers(0, 8))
        kind = draw(st.sampled_from(["flip", "cut", "repeat", "insert"]))
        if kind == "flip" and place < len(data):
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[place : place + size]
        elif kind == "repeat":
            data[place:place] = data[place : place + size]
        else:
            data[place:place] = draw(st.binary(max_size=8))
    return bytes(data)


WIRE = st.one_of(
    requests(wild=False).map(lambda request: request.SerializeToString()),
    requests(wild=True).map(lambda request: request.SerializeToString()),
    mutations(),
    st.binary(max_size=40),
)
fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
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
def test_every_request_has_its_answer(
    run: Callable[..., Reply], data: bytes, timeout_s: float | None, leave_after: int | None
) -> None:
    try:
        request = pb.GenerateRequest.FromString(data)
        wrong = wrong_fields(request, SERVED)
        # Whether a schema can be served is not for its bounds to say.
        assume(wrong or not request.sampling_params.json_schema)
    except DecodeError:
        request, wrong = pb.GenerateRequest(), {"request"}
    reply = run("Generate", data, timeout_s=timeout_s, leave_after=leave_after)
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
    return Letters().encode(request.text) if request.text else list(request.token_ids.ids)


def sampling_of(request: pb.GenerateRequest, seed: int) -> SamplingParams:
    """What decides the tokens of a simulated node."""
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


@settings(fuzzed, max_examples=max(100, EXAMPLES // 10))
@given(question=QUESTIONS, tail=st.one_of(st.just(b""), st.just(b""), st.binary(max_size=6)))
def test_every_question_has_its_answer(run: Callable[..., Reply], question: tuple[str, Any], tail: bytes) -> None:
    method, request = question
    reply = run(method, request.SerializeToString() + tail)
    if tail:
        assert reply.code in ANSWERS[method] | {"INVALID_ARGUMENT"}, reply
        return
    assert reply.code in ANSWERS[method], reply
    if method == "Tokenize":
        assert (reply.code == "OK") == (request.model == "" and "\0" not in request.text), reply
    if method == "Detokenize":
        is_good = request.model != "é" and all(token < SPEC.vocab_size for token in request.token_ids)
        assert (reply.code == "OK") == is_good, reply
