"""Fuzzed messages between routers and nodes: a bad message harms only the request that it is about.

`BATON_FUZZ_EXAMPLES=100000` runs that many.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import replace
from random import Random

import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from baton.messages.node import Outcome, RequestDelta, StepReport
from baton.v1 import generation_pb2, node_pb2
from baton.wire.codec.node import report_from_pb, report_to_pb
from baton.wire.services.node_service import NodeServicer
from tests.support.fuzzed_cluster import FuzzedCluster, Run, events_of, fuzzed_cluster, tokens_of
from tests.support.local_rpc import Reply

EXAMPLES = int(os.environ.get("BATON_FUZZ_EXAMPLES", "60"))
VICTIM = generation_pb2.GenerateRequest(
    request_id="victim", token_ids={"ids": [9, 9, 9]}, sampling_params={"seed": 1, "max_tokens": 8}
)


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with fuzzed_cluster() as made:
        yield made


fuzzed = settings(
    max_examples=EXAMPLES,
    database=None,
    derandomize=EXAMPLES <= 500,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def mutated(draw: st.DrawFn, data: bytearray, at_most: int) -> bytes:
    for _ in range(draw(st.integers(0, at_most))):
        place = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(["flip", "cut", "insert"]))
        if kind == "flip" and data:
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[place : place + draw(st.integers(1, 6))]
        else:
            data[place:place] = draw(st.binary(max_size=6))
    return bytes(data)


# From a router to a node.

ATTEMPTS = st.builds(
    node_pb2.Attempt,
    request_id=st.sampled_from(["r", "r", "other", "", "\0", "x" * 200]),
    attempt=st.sampled_from([1, 1, 0, 2**32 - 1]),
    flight=st.sampled_from([1, 1, 0, 2**64 - 1]),
)


@st.composite
def router_messages(draw: st.DrawFn) -> bytes:
    message = node_pb2.AttachRequest()
    kind = draw(st.sampled_from(["submit", "submit", "submit", "abort", "adopt", "watch_kv_cache", "hello"]))
    getattr(message, kind).SetInParent()
    if kind in ("submit", "abort", "adopt"):
        getattr(message, kind).attempt.CopyFrom(draw(ATTEMPTS))
    if kind == "submit":
        submit = message.submit
        is_good = draw(st.booleans())
        submit.leg = draw(st.sampled_from([1, 1, 2, 3] if is_good else [0, 1, 2, 3, 99]))  # type: ignore[assignment]  # any number
        submit.prompt_token_ids.extend(draw(st.lists(st.integers(0, 96 if is_good else 97), min_size=1, max_size=12)))
        params = submit.sampling_params
        params.temperature, params.top_p, params.top_k = 0.0, 1.0, -1
        params.repetition_penalty = 1.0
        params.max_tokens = draw(st.sampled_from([1, 3, 9] if is_good else [0, 127, 2**31]))
        params.n = draw(st.sampled_from([1, 1, 1, 2] if is_good else [1, 0, 9]))
        if draw(st.integers(0, 3)) == 0:
            submit.output_token_ids.extend(draw(st.lists(st.integers(0, 96), max_size=3)))
        if submit.leg == 3 or draw(st.integers(0, 5)) == 0:
            submit.kv_source.node_id = draw(st.sampled_from(["prefill-0", "", "nobody"]))
            submit.kv_source.incarnation = draw(st.sampled_from(["prefill-0.1", "x"]))
            submit.kv_source.address = draw(st.sampled_from(["prefill-0:1001", "", "nowhere:1"]))
    return mutated(draw, bytearray(message.SerializeToString()), draw(st.sampled_from([0, 0, 2])))


class _Context:
    """A servicer context that is never used."""


async def attach(cluster: FuzzedCluster, node_id: str, messages: Sequence[bytes]) -> set[int]:
    """A router that sends these messages, reads some reports and disconnects. Returns the outcomes that it read."""
    node = cluster.cluster.nodes[node_id]
    all_said = asyncio.Event()

    async def requests() -> AsyncIterator[node_pb2.AttachRequest]:
        yield node_pb2.AttachRequest(hello=node_pb2.AttachHello(router_id="stranger", router_incarnation="stranger.1"))
        for message in messages:
            try:
                request = node_pb2.AttachRequest.FromString(message)
            except DecodeError:
                break  # as gRPC breaks the stream
            # A simulated node has no thread that compiles grammars.
            if request.HasField("submit"):
                request.submit.sampling_params.ClearField("json_schema")
            yield request
        await asyncio.sleep(0.5)
        all_said.set()

    stream = NodeServicer(node.service).Attach(requests(), _Context())  # type: ignore[arg-type]

    outcomes: set[int] = set()

    async def listen() -> None:
        async for response in stream:
            outcomes.update(delta.outcome for delta in response.report.deltas)

    listening = asyncio.create_task(listen())
    await all_said.wait()
    await asyncio.sleep(0.5)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    assert isinstance(stream, AsyncGenerator)
    await stream.aclose()
    return outcomes


@fuzzed
@given(node_id=st.sampled_from(["prefill-0", "decode-0"]), messages=st.lists(router_messages(), min_size=1, max_size=5))
def test_invalid_messages_of_a_router_do_not_harm_a_node(run: Run, node_id: str, messages: list[bytes]) -> None:
    for outcome in run(lambda cluster: attach(cluster, node_id, messages)):
        event(node_pb2.Outcome.Name(outcome))


# From a node to a router.


class Liar:
    """A node whose reports about one request are falsified."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)

    def __call__(self, report: StepReport) -> Sequence[StepReport]:
        true = [delta for delta in report.deltas if delta.attempt.request_id != "victim"]
        about = [delta for delta in report.deltas if delta.attempt.request_id == "victim"]
        if not about or self._rng.random() < 0.5:
            return (report,)
        lie = self._garbled(replace(report, deltas=[self._altered(delta) for delta in about]))
        return (*lie, replace(report, deltas=true))

    def _altered(self, delta: RequestDelta) -> RequestDelta:
        rng = self._rng
        name, value = rng.choice(
            [
                ("first_index", rng.choice([0, 1, 3, 7, 2**31])),
                ("token_ids", [rng.randrange(120) for _ in range(rng.randrange(4))]),
                ("outcome", rng.choice([None, *Outcome])),
                ("sequence_index", rng.choice([1, 7, 2**31])),
                ("stop_token_id", rng.choice([None, 3])),
                ("attempt", delta.attempt._replace(attempt=rng.choice([0, 2, 2**31]))),
            ]
        )
        return replace(delta, **{name: value})

    def _garbled(self, report: StepReport) -> Sequence[StepReport]:
        data = bytearray(report_to_pb(report).SerializeToString())
        if self._rng.random() < 0.3:
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        try:
            return (report_from_pb(node_pb2.StepReport.FromString(bytes(data))),)
        except DecodeError:
            return ()


async def ask_beside_a_liar(cluster: FuzzedCluster, seed: int) -> Reply:
    honest, cluster.report_filter.replace_report = cluster.report_filter.replace_report, Liar(seed)
    try:
        return await cluster.call("Generate", VICTIM.SerializeToString(), timeout_s=60.0)
    finally:
        cluster.report_filter.replace_report = honest


@fuzzed
@given(seed=st.integers(0, 2**32))
def test_wrong_reports_about_one_request_harm_that_request_only(run: Run, seed: int) -> None:
    reply = run(lambda cluster: ask_beside_a_liar(cluster, seed))
    event(reply.code)
    assert "the router failed while it handled this request" not in reply.details, reply
    if reply.code == "OK":
        assert len(tokens_of(events_of(reply))) <= VICTIM.sampling_params.max_tokens
