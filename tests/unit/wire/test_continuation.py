"""A client's answer over any number of routers: each token once, in order, with its text."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.client.continuation import AVOID_S, Call, CallKind, Continuation, EndpointRotation, with_id_and_seed
from baton.errors import (
    BatonError,
    ContinuedElsewhere,
    Draining,
    DuplicateRequest,
    EngineFault,
    InvalidRequest,
    NoCapacity,
    QuotaExceeded,
    RequestNotFound,
    StreamDiverged,
    Unreachable,
)
from baton.messages.generation import (
    Accepted,
    Chunk,
    Finished,
    GenerateEvent,
    GenerateRequest,
    Path,
    PromptLogprobs,
    SequenceFinished,
)
from baton.messages.sampling import TokenLogprobs

FINISHED = Finished("length", None, 1, 9, 0, 0, 0, 0, 0, 0, 0, Path("", "d", 1, ""))
ACCEPTED = Accepted("r", 1, 3)
LOST = Unreachable("gone")


def continuation(num_routers: int = 2, *, owns_id: bool = True) -> Continuation:
    rng = Random(1)
    return Continuation(EndpointRotation([f"h:{n}" for n in range(num_routers)], rng), rng, 0.0, 60.0, owns_id=owns_id)


OF_PROMPT = PromptLogprobs((TokenLogprobs(4, -1.0, 1, ()),))


class Server:
    """Routers that all give the same answer, each time in other pieces."""

    def __init__(self, rng: Random, num_sequences: int) -> None:
        self._rng = rng
        self.texts = [
            ["".join(rng.choice("xyz") for _ in range(rng.randint(0, 3))) for _ in range(rng.randint(1, 9))]
            for _ in range(num_sequences)
        ]
        self.tails = [rng.choice(["", "tail"]) for _ in range(num_sequences)]

    def events(self, call: Call) -> Iterator[GenerateEvent]:
        """Yield the answer from the positions of the call on."""
        yield ACCEPTED
        at = [0] * len(self.texts)
        if call.kind is CallKind.RESUME:
            at = [*call.positions, *at][: len(at)]
        if not any(at):
            yield OF_PROMPT
        live = list(range(len(self.texts)))
        while live:
            index = self._rng.choice(live)
            count = len(self.texts[index])
            if at[index] < count:
                last = min(count, at[index] + self._rng.randint(1, 4))
                pieces, tokens = self.texts[index][at[index] : last], tuple(range(at[index], last))
                logprobs = tuple(TokenLogprobs(token, -1.0, 1, ()) for token in tokens)
                yield Chunk(at[index], tokens, "".join(pieces), logprobs, index)
                at[index] = last
                continue
            live.remove(index)
            if self.tails[index] and at[index] == count:
                yield Chunk(count, (), self.tails[index], (), index)
            if len(self.texts) > 1:
                yield SequenceFinished(index, "length", None, count)
        yield FINISHED


@settings(max_examples=400)
@given(seed=st.integers(0, 2**32), n=st.integers(1, 3), num_routers=st.integers(1, 3))
def test_the_caller_gets_each_event_once_whatever_breaks(seed: int, n: int, num_routers: int) -> None:
    rng = Random(seed)
    server, answer = Server(rng, n), continuation(num_routers)
    tokens: list[list[int]] = [[] for _ in range(n)]
    texts = [""] * n
    seen: list[GenerateEvent] = []
    now, breaks = 0.0, 30
    is_over = False
    while not is_over:
        now += 0.1
        call = answer.next_call()
        error: BatonError = LOST
        if call.kind is CallKind.RESUME and rng.random() < 0.4:
            error = RequestNotFound("nobody knows it")
        elif call.kind is CallKind.GENERATE and answer.num_calls > 1 and rng.random() < 0.3:
            error = DuplicateRequest("is live")
        else:
            for event in server.events(call):
                if breaks and rng.random() < 0.2 and ACCEPTED in seen:
                    breaks -= 1
                    break
                fresh = answer.receive(event, now)
                if isinstance(fresh, Chunk):
                    own = tokens[fresh.sequence_index]
                    assert fresh.first_index == len(own)
                    assert [position.token_id for position in fresh.logprobs] == list(fresh.token_ids)
                    own += fresh.token_ids
                    texts[fresh.sequence_index] += fresh.text
                elif fresh is not None:
                    assert fresh not in seen
                    seen.append(fresh)
                    is_over = isinstance(fresh, Finished)
        if not is_over:
            answer.call_failed(error, now)
    assert tokens == [list(range(len(pieces))) for pieces in server.texts]
    assert texts == ["".join(pieces) + tail for pieces, tail in zip(server.texts, server.tails, strict=True)]
    assert len(seen) == 3 + (n if n > 1 else 0)


def test_each_router_is_tried_once_before_the_request_is_accepted() -> None:
    answer = continuation(3)
    places = set()
    for _ in range(2):
        call = answer.next_call()
        assert call.kind is CallKind.GENERATE
        places.add(call.endpoint)
        assert answer.call_failed(LOST, 0.0) == 0.0
    places.add(answer.next_call().endpoint)
    assert places == {0, 1, 2}
    with pytest.raises(Unreachable):
        answer.call_failed(LOST, 0.0)


def test_a_request_refused_by_a_full_or_closing_router_goes_to_another() -> None:
    for error in (NoCapacity("no node is up"), Draining("closing")):
        answer = continuation(2)
        first = answer.next_call().endpoint
        answer.call_failed(error, 0.0)
        assert answer.next_call().endpoint != first
        with pytest.raises(type(error)):
            answer.call_failed(error, 0.0)


@pytest.mark.parametrize("refused_first", [True, False])
def test_a_refusal_is_reported_rather_than_an_unreachable_router(refused_first: bool) -> None:
    endpoints = EndpointRotation(["a", "b"], Random(0))
    endpoints.has_answered = True  # it would be asked again for a while, were both lost
    c, quota = Continuation(endpoints, Random(0), 0.0, 5.0), QuotaExceeded("enough for this minute", 12.0)
    errors = [quota, Unreachable("connection refused")]
    first, second = errors if refused_first else reversed(errors)
    assert c.call_failed(first, 0.1) == 0.0
    with pytest.raises(QuotaExceeded) as caught:
        c.call_failed(second, 0.2)
    assert caught.value is quota


def test_a_client_of_a_known_cluster_waits_for_connections_to_return() -> None:
    rng = Random(1)
    endpoints = EndpointRotation(["a", "b"], rng)
    Continuation(endpoints, rng, 0.0, 60.0).receive(ACCEPTED, 0.0)
    answer, now, places = Continuation(endpoints, rng, 10.0, 60.0), 10.0, []
    while now < 15.0:
        places.append(answer.next_call().endpoint)
        now += answer.call_failed(LOST, now) + 0.001
    assert set(places[-4:]) == {0, 1}, "all of them, again and again"
    assert len(places) < 40, "and not without a pause"
    with pytest.raises(Unreachable):
        answer.call_failed(LOST, now)
    full = Continuation(endpoints, rng, 20.0, 60.0)
    full.call_failed(NoCapacity("no node is up"), 20.0)
    with pytest.raises(NoCapacity):
        full.call_failed(NoCapacity("no node is up"), 20.0)


def test_an_accepted_request_is_resumed_as_long_as_the_budget_lasts() -> None:
    answer = continuation(2)
    answer.next_call()
    answer.receive(ACCEPTED, 10.0)
    answer.receive(Chunk(0, (5, 6), "ab"), 10.0)
    waits = []
    for step in range(12):
        waits.append(answer.call_failed(LOST, 10.0 + step))
        call = answer.next_call()
        assert (call.kind, call.positions) == (CallKind.RESUME, [2])
    assert waits[:2] == [0.0, 0.0]
    assert all(0 < wait <= 1 for wait in waits[2:])
    assert waits[-1] > 0.4
    answer.call_failed(LOST, 70.0)
    with pytest.raises(Unreachable):
        answer.call_failed(LOST, 70.1)


def test_waiting_on_a_live_connection_does_not_use_the_budget() -> None:
    c = continuation()
    c.next_call()
    c.receive(ACCEPTED, 0.1)
    assert c.call_failed(LOST, 3600.0) == 0.0
    assert c.next_call().kind is CallKind.RESUME
    c.receive(ACCEPTED, 3630.0)
    assert c.call_failed(LOST, 9000.0) == 0.0
    c.next_call()
    with pytest.raises(Unreachable):
        c.call_failed(LOST, 9031.0)


def test_a_router_that_delays_and_then_refuses_a_request_uses_the_budget() -> None:
    c = continuation()
    c.next_call()
    c.receive(ACCEPTED, 0.1)
    with pytest.raises(NoCapacity):
        c.call_failed(NoCapacity("no node came back"), 120.0)


def test_routers_that_accept_a_request_and_die_at_once_use_the_budget() -> None:
    c, now = continuation(), 0.0
    while now < 60.0:
        c.next_call()
        c.receive(ACCEPTED, now)
        now += c.call_failed(LOST, now)
    c.next_call()
    c.receive(ACCEPTED, now + 1.0)
    with pytest.raises(Unreachable):
        c.call_failed(LOST, now + 1.0)


def test_a_request_that_its_router_released_goes_to_the_next_one_as_a_later_call() -> None:
    answer = continuation(2)
    first = answer.next_call()
    answer.receive(ACCEPTED, 0.0)
    assert answer.call_failed(ContinuedElsewhere("this router is shutting down"), 0.0) == 0.0
    second = answer.next_call()
    assert (second.kind, second.endpoint) == (CallKind.RESUME, 1 - first.endpoint)
    assert (first.number, second.number) == (1, 2)


def test_a_request_that_no_router_knows_is_generated_again_and_compared() -> None:
    answer = continuation(1)
    answer.next_call()
    answer.receive(ACCEPTED, 0.0)
    answer.receive(Chunk(0, (5, 6), "ab"), 0.0)
    answer.call_failed(LOST, 0.0)
    answer.next_call()
    answer.call_failed(RequestNotFound("who?"), 0.0)
    assert answer.next_call().kind is CallKind.GENERATE
    assert answer.receive(ACCEPTED, 0.0) is None
    assert answer.receive(Chunk(0, (5,), "a"), 0.0) is None
    assert answer.receive(Chunk(1, (6, 7), "bc"), 0.0) == Chunk(2, (7,), "c")
    answer.call_failed(LOST, 0.0)
    answer.next_call()
    answer.call_failed(RequestNotFound("who?"), 0.0)
    answer.next_call()
    with pytest.raises(StreamDiverged, match="from token 0 on other tokens came"):
        answer.receive(Chunk(0, (5, 9), "ax"), 0.0)
    with pytest.raises(StreamDiverged, match="token 3 came where token 0 was due"):
        answer.receive(Chunk(3, (9,), "x"), 0.0)


def test_an_error_about_the_request_itself_is_final() -> None:
    for error in (InvalidRequest("top_p", "is bad"), EngineFault("NaN"), StreamDiverged("other tokens")):
        answer = continuation()
        answer.next_call()
        answer.receive(ACCEPTED, 0.0)
        with pytest.raises(type(error)):
            answer.call_failed(error, 0.0)


def test_a_request_id_that_another_client_may_use_is_not_resumed() -> None:
    answer = continuation(owns_id=False)
    answer.next_call()
    with pytest.raises(DuplicateRequest):
        answer.call_failed(DuplicateRequest("is live"), 0.0)
    drawn = continuation()
    drawn.next_call()
    drawn.call_failed(DuplicateRequest("is live"), 0.0)
    assert drawn.next_call().kind is CallKind.RESUME


def test_a_request_gets_an_id_and_a_seed_to_be_repeatable() -> None:
    made = with_id_and_seed(GenerateRequest("x"), Random(1))
    assert made.request_id
    assert made.seed is not None
    chosen = GenerateRequest("x", request_id="mine", seed=0)
    assert with_id_and_seed(chosen, Random(1)) == chosen


def test_clients_spread_over_routers_and_skip_dead_ones_for_a_while() -> None:
    endpoints = EndpointRotation(["a", "b", "c"], Random(1))
    assert {endpoints.pick_first(0.0) for _ in range(50)} == {0, 1, 2}
    endpoints.note_failure(1, 0.0)
    assert {endpoints.pick_first(1.0) for _ in range(50)} == {0, 2}
    assert (endpoints.pick_next(0, 1.0), endpoints.pick_next(2, 1.0)) == (2, 0)
    assert {endpoints.pick_first(AVOID_S) for _ in range(50)} == {0, 1, 2}
    for place in (0, 2):
        endpoints.note_failure(place, 1.0)
    assert endpoints.pick_next(0, 2.0) == 1
    assert EndpointRotation(["a"], Random(1)).pick_next(0, 0.0) == 0
    with pytest.raises(ValueError, match="address"):
        EndpointRotation([], Random(1))
