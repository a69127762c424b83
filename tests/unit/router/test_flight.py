"""The rules of a flight: golden conversations, every (state, event) pair, and random faults that change no token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import AttemptsExhausted, ContinuedElsewhere, DeadlineExceeded, TransferCause
from baton.machine import IllegalEvent, render_mermaid
from baton.messages.ids import Peer
from baton.messages.node import Leg, NodeDescription, Outcome, RequestDelta, StageTimings, Submit
from baton.messages.sampling import TokenLogprobs
from baton.messages.spans import EncoderContent
from baton.messages.speculation import NO_DRAFTS, DraftCounts
from router.flight.flight import MIN_UNRELATED_NODES, Flight
from router.flight.flight_attempt import MAX_UNRELATED_LOSSES, REFILL_TOKENS, AttemptTimings
from router.flight.flight_table import (
    FLIGHT_TABLE,
    LIVE,
    TERMINAL,
    AbortLeg,
    AdoptLeg,
    AttemptCause,
    Cancel,
    Delta,
    EmitPromptLogprobs,
    EmitTokens,
    Fail,
    Finish,
    FlightEffect,
    FlightEvent,
    FlightState,
    FlightStep,
    GiveUp,
    LeaveToOtherRouter,
    LegEnded,
    LinkBack,
    MovedAway,
    MoveEnded,
    MoveStream,
    MoveTo,
    NodeGone,
    Place,
    Placed,
    SequenceEnded,
    StopMove,
    StopStringFound,
    SubmitLeg,
)
from router.flight.timeline import EndedRequest, Moments, timeline
from router.placement.placement import Origin, Placement
from router.placement.reasons import IN_TURN
from tests.support.router_parts import decode, key, prefill, request

CONVERSATIONS = sorted((Path(__file__).parent / "flight_conversations").glob("*.txt"))


def node(name: str) -> NodeDescription:
    return prefill(name) if name.startswith("p") else decode(name)


def placed(first: str, second: str) -> Placed:
    return Placed(Placement(None if first == "-" else node(first), node(second), IN_TURN))


def begun(first: str, second: str, **fields: Any) -> Flight:
    """A flight whose first attempt is on these nodes; `fields`: of its request."""
    flight = Flight(request(**fields))
    flight.start()
    flight.handle(placed(first, second))
    return flight


def reported(node_id: str, attempt: int = 1, at: int = 0, tokens: Sequence[int] = (), **fields: Any) -> Delta:
    return Delta(f"{node_id}.1", RequestDelta(key(attempt), at, tokens, **fields))


def parse_delta(words: Sequence[str]) -> Delta:
    incarnation, attempt, *rest = words
    fields: dict[str, list[str]] = {}
    for word in rest:
        if word in ("at", "tokens", "outcome", "token", "of", "cause", "takeover", "prompt"):
            current = fields.setdefault(word, [])
        else:
            current.append(word)
    delta = RequestDelta(
        attempt=key(int(attempt)),
        first_index=int(fields.get("at", ["0"])[0]),
        token_ids=tuple(int(token) for token in fields.get("tokens", [])),
        outcome=Outcome(fields["outcome"][0]) if "outcome" in fields else None,
        stop_token_id=int(fields["token"][0]) if "token" in fields else None,
        sequence_index=int(fields.get("of", ["0"])[0]),
        transfer_cause=TransferCause(fields["cause"][0]) if "cause" in fields else None,
        takeover=int(fields.get("takeover", ["0"])[0]),
        prompt_logprobs=[TokenLogprobs(int(token), -1.0, 1, ()) for token in fields.get("prompt", [])],
    )
    return Delta(incarnation, delta)


def parse(line: str) -> FlightEvent:
    verb, *words = line.split()
    match verb:
        case "placed":
            return placed(*words)
        case "delta":
            return parse_delta(words)
        case "gone":
            return NodeGone(words[0], f"{words[0]} died")
        case "back":
            return LinkBack(words[0])
        case "stop-string":
            return StopStringFound(words[0], int(words[2]) if words[1:] else 0)
        case "cancel":
            return Cancel("gone")
        case "move":
            return MoveTo(node(words[0]), int(words[1]) if words[1:] else 100)
        case "stay":
            return StopMove(key(int(words[0])), "late")
        case "let-go":
            return LeaveToOtherRouter(ContinuedElsewhere("this router ends"))
    raise AssertionError(f"no such event: {line}")


def show(effect: FlightEffect) -> str:
    match effect:
        case Place(attempt, exclude, cause):
            why = "" if cause is AttemptCause.FIRST else f" {cause.value}"
            return " ".join([f"place {attempt}{why}", *(["without", *sorted(exclude)] if exclude else [])])
        case SubmitLeg(incarnation, submit):
            source = f" from {submit.kv_source.incarnation}" if submit.kv_source else ""
            source += f" by {submit.cut_by}" if submit.cut_by else ""
            given = " ".join(["", "behind", *map(str, submit.output_token_ids)]) if submit.output_token_ids else ""
            return f"submit {incarnation} {submit.leg.value} {submit.attempt}{source}{given}"
        case AdoptLeg(incarnation, adopt, _):
            known = " ".join([" has", *map(str, adopt.num_tokens)]) if adopt.num_tokens else ""
            takeover = f" takeover {adopt.takeover}" if adopt.takeover else ""
            return f"adopt {incarnation} {adopt.attempt}{takeover}{known}"
        case AbortLeg(incarnation, abort):
            assert abort.reason
            of = f" of {abort.sequence_index}" if abort.sequence_index is not None else ""
            return f"abort {incarnation} {abort.attempt}{of}"
        case MoveStream(incarnation, move):
            return f"move {incarnation} {move.attempt} to {move.to} with {move.num_tokens} by {move.cut_by}"
        case MoveEnded(to, placement, why):
            return f"moved {to}" if placement is not None else f"stays {to}: {why or 'over'}"
        case LegEnded(incarnation, attempt):
            return f"ended {incarnation} {attempt}"
        case EmitTokens(first, tokens, _, is_stop, index):
            of = f" of {index}" if index else ""
            return f"emit {first}{of}: {' '.join(map(str, tokens))}" + (" stop-token" if is_stop else "")
        case EmitPromptLogprobs(positions):
            return f"emit prompt: {' '.join(str(position.token_id) for position in positions)}"
        case SequenceEnded(index, reason, stop):
            return f"over {index}: {reason} {stop}"
        case Finish(reason, stop, _, path):
            via = " ".join(filter(None, (path.prefill_node, path.decode_node)))
            return f"finish {reason} {stop} via {via} attempts {path.attempts}"
        case Fail(error):
            return f"fail {type(error).__name__} {error}"
        case MovedAway(error):
            return f"moved {type(error).__name__} {error}"


def feed(flight: Flight, event: FlightEvent, *, quick: bool) -> list[FlightEffect]:
    """Feed an event and return its effects; `quick`: by the fast path where the event allows it."""
    if quick and isinstance(event, Delta) and flight.take_if_next(event.incarnation, event.delta):
        delta = event.delta
        return [EmitTokens(delta.first_index, delta.token_ids, delta.logprobs, False, delta.sequence_index)]
    return flight.handle(event)


def execute_line(flight: Flight, line: str, *, quick: bool) -> list[FlightEffect]:
    """Execute one line of a conversation."""
    verb, *words = line.split()
    match verb:
        case "start":
            return flight.start()
        case "adopt":
            return flight.adopt(key(int(words[2])), placed(words[0], words[1]).placement, int(words[4]))
        case "settle":
            return flight.end_adoption(words[0])
        case "takeover":
            flight.takeover = int(words[0])
            return []
    return feed(flight, parse(line), quick=quick)


def replay(conversation: str, *, quick: bool) -> str:
    """Replay a conversation and return it in the notation of the files."""
    begin = next(line for line in conversation.splitlines() if line.startswith("> "))
    asks = " asks prompt-logprobs" in begin
    asked = request(n=int(begin.partition(" n ")[2] or 1))
    if asks:
        asked = replace(asked, sampling_params=replace(asked.sampling_params, prompt_logprobs=0))
    flight = Flight(asked)
    lines = []
    for line in conversation.strip().splitlines():
        if line.startswith("#"):
            lines.append(line)
        elif line.startswith("> "):
            lines.append(line)
            lines += [show(effect) for effect in execute_line(flight, line[2:], quick=quick)]
        elif line.startswith("= "):
            lines.append(f"= {flight.state.name}")
        elif line.startswith("stale "):
            lines.append(f"stale {flight.num_stale_events}")
    return "\n".join(lines)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("path", CONVERSATIONS, ids=lambda path: path.stem)
def test_the_flight_follows_the_golden_conversation(path: Path, quick: bool) -> None:
    for conversation in path.read_text().split("---\n"):
        expected = conversation.strip().splitlines()
        actual = replay(conversation, quick=quick).splitlines()
        # A file may shorten the text of an error.
        shortened = [
            want if want.startswith("fail ") and got.startswith(want) else got
            for want, got in zip(expected, actual, strict=False)
        ]
        assert shortened + actual[len(expected) :] == expected


OF_PROMPT = StageTimings(queue_ms=4.0, prefill_ms=40.0, cached_tokens=16)
OF_DECODE = StageTimings(queue_ms=1.0, transfer_ms=9.0, external_tokens=3, kv_bytes=99, intake_ms=48.0, decode_ms=45.0)


def reports(attempt: int, num_sequences: int) -> list[Delta]:
    """What the nodes of a pair report of an attempt with two tokens for each sequence, the prefill node first."""
    handed_off = RequestDelta(key(attempt), 0, (10,), outcome=Outcome.HANDED_OFF, timings=OF_PROMPT)
    begun = RequestDelta(key(attempt), 0, (10,), timings=OF_DECODE, prompt_timings=OF_PROMPT)
    ended = RequestDelta(key(attempt), 1, (11,), outcome=Outcome.LENGTH, timings=OF_DECODE)
    decoded = [replace(delta, sequence_index=index) for delta in (begun, ended) for index in range(num_sequences)]
    # What the nodes measured comes with the first sequence.
    first = [delta if delta.sequence_index == 0 else replace(delta, prompt_timings=None) for delta in decoded]
    return [Delta(f"p{attempt}.1", handed_off), *(Delta(f"d{attempt}.1", delta) for delta in first)]


@pytest.mark.parametrize(("attempts", "num_sequences"), [(1, 1), (2, 1), (1, 2)])
def test_an_answer_has_the_prompts_timings_in_whatever_order_its_nodes_report(
    attempts: int, num_sequences: int
) -> None:
    of_prefill, *of_decode = reports(attempts, num_sequences)
    for place in range(len(of_decode) + 1):
        flight = begun("p1", "d1", max_tokens=2, n=num_sequences)
        if attempts == 2:
            # Of the attempt that fails nothing is left.
            flight.handle(reported("d1", timings=OF_DECODE, prompt_timings=StageTimings(7.0)))
            flight.handle(NodeGone("d1.1", "died"))
            flight.handle(placed("p2", "d2"))
            assert flight.attempt_timings().prompt is None
        effects = [
            effect for event in [*of_decode[:place], of_prefill, *of_decode[place:]] for effect in flight.handle(event)
        ]
        (finish,) = [effect for effect in effects if isinstance(effect, Finish)]
        assert finish.timings == StageTimings(4.0, 40.0, 9.0, 16, 3, 99)
        at_end = AttemptTimings(f"p{attempts}", OF_PROMPT, f"d{attempts}", OF_DECODE, True)
        assert flight.attempt_timings() == at_end
        moments = Moments(10.0, 10.001, 10.003, 10.003, 10.003, 10.05)
        told = EndedRequest("r", moments, 10.1, "finished", "length", attempts, False, at_end, at_end, 3, 2)
        found = timeline(told, "router", 11.0)
        assert found.cached_tokens == 16
        assert [stage.duration_ns for stage in found.stages if stage.name == "prefill"] == [40_000_000]
        assert sum(stage.duration_ns for stage in found.stages) == found.total_ns == 100_000_000


def test_a_decode_node_that_computed_the_prompt_itself_says_what_it_had_cached() -> None:
    flight = begun("p1", "d1", max_tokens=1)
    flight.handle(NodeGone("p1.1", "died"))
    flight.handle(placed("p1", "d1"))
    own = StageTimings(queue_ms=1.0, prefill_ms=30.0, cached_tokens=2)
    (*_, finish) = flight.handle(reported("d1", 2, 0, (10,), outcome=Outcome.LENGTH, timings=own))
    assert isinstance(finish, Finish)
    assert (finish.timings.prefill_ms, finish.timings.cached_tokens) == (30.0, 2)


@pytest.mark.parametrize(
    "end", [NodeGone("d1.1", "died"), StopStringFound("END"), Cancel("gone")], ids=lambda e: type(e).__name__
)
def test_next_tokens_are_taken_directly_until_another_event(end: FlightEvent) -> None:
    flight, first = begun("p1", "d1"), key()
    flight.handle(reported("d1", 1, 0, (10,)))
    assert flight.take_if_next("d1.1", RequestDelta(first, 1, (11,)))
    assert flight.take_if_next("d1.1", RequestDelta(first, 2, (12,)))
    assert not flight.take_if_next("d1.1", RequestDelta(first, 4, (14,))), "a gap"
    flight.handle(end)
    late = RequestDelta(first, 3, (13,))
    assert not flight.take_if_next("d1.1", late)
    assert flight.num_output_tokens == 3
    if not flight.is_over:
        flight.handle(placed("p2", "d2"))
        assert not flight.take_if_next("d1.1", late)
        flight.handle(reported("p2", 2, 0, (10,)))
        assert flight.take_if_next("d2.1", RequestDelta(key(2), 3, (13,)))
        assert not flight.take_if_next("d1.1", RequestDelta(first, 4, (14,)))


def test_both_legs_have_the_turn() -> None:
    flight = Flight(request())
    flight.start()
    effects = flight.handle(replace(placed("p1", "d1"), turn=2.5))
    assert [effect.submit.turn for effect in effects if isinstance(effect, SubmitLeg)] == [2.5, 2.5]


def test_the_node_that_computes_the_prompt_hears_who_has_rows_of_its_images() -> None:
    images = [EncoderContent.of(text) for text in (b"a", b"b")]
    holder = Peer("p9", "p9.1", "127.0.0.1:9")
    pair = placed("p1", "d1").placement
    encoder = Peer("e9", "e9.1", "127.0.0.1:8")
    named = replace(pair, holders=[(images[1].digest, holder)], encoders=[(images[0].digest, encoder)])
    for placement in (named, replace(pair, prefill=None, holders=[])):
        flight = Flight(replace(request(), contents=images))
        flight.start()
        told = {
            effect.submit.leg: [(content.held_by, content.encoded_by) for content in effect.submit.spec.contents]
            for effect in flight.handle(Placed(placement))
            if isinstance(effect, SubmitLeg)
        }
        if placement.prefill is None:
            assert told == {Leg.WHOLE: [(None, None)] * 2}
        else:
            assert told == {Leg.PREFILL: [(None, encoder), (holder, None)], Leg.DECODE: [(None, None)] * 2}


EVENTS: dict[str, FlightEvent] = {
    "placed": placed("p2", "d2"),
    "tokens": reported("p1", tokens=(10,)),
    "stop": reported("d1", tokens=(10, 11), outcome=Outcome.STOP),
    "handed_off": reported("p1", outcome=Outcome.HANDED_OFF),
    "kv_lost": reported("d1", outcome=Outcome.KV_LOST),
    "refused": reported("d1", outcome=Outcome.REFUSED),
    "error": reported("d1", outcome=Outcome.ERROR),
    "ignored": reported("d1", outcome=Outcome.IGNORED),
    "aborted": reported("d1", outcome=Outcome.ABORTED),
    "other_attempt": reported("d1", 7, tokens=(99,), outcome=Outcome.STOP),
    "other_node": reported("d9", tokens=(99,), outcome=Outcome.STOP),
    "prefill_gone": NodeGone("p1.1", "died"),
    "decode_gone": NodeGone("d1.1", "died"),
    "stranger_gone": NodeGone("d9.1", "died"),
    "prefill_back": LinkBack("p1.1"),
    "decode_back": LinkBack("d1.1"),
    "stranger_back": LinkBack("d9.1"),
    "stop_string": StopStringFound("END"),
    "cancel": Cancel("gone"),
    "let-go": LeaveToOtherRouter(ContinuedElsewhere("this router ends")),
    "deadline": GiveUp(DeadlineExceeded("late")),
}
F = FlightState
TO_RETRYING = {F.PREFILLING: F.RETRYING, F.STREAMING: F.RETRYING}
EXPECTED: dict[str, dict[FlightState, FlightState]] = {
    "placed": {F.PLACING: F.PREFILLING, F.RETRYING: F.PREFILLING},
    "tokens": {F.PREFILLING: F.STREAMING},
    "stop": {F.PREFILLING: F.FINISHED, F.STREAMING: F.FINISHED},
    "kv_lost": TO_RETRYING,
    "refused": TO_RETRYING,
    "aborted": TO_RETRYING,
    "prefill_gone": TO_RETRYING,
    "decode_gone": TO_RETRYING,
    "error": {F.PREFILLING: F.FAILED, F.STREAMING: F.FAILED},
    "ignored": {F.PREFILLING: F.FAILED, F.STREAMING: F.FAILED},
    "stop_string": {F.STREAMING: F.FINISHED, F.RETRYING: F.FINISHED},
    "cancel": dict.fromkeys(LIVE, F.CANCELLED),
    "let-go": dict.fromkeys(LIVE, F.CANCELLED),
    "deadline": dict.fromkeys(LIVE, F.FAILED),
}
ILLEGAL = {
    ("placed", F.PREFILLING),
    ("placed", F.STREAMING),
    ("stop_string", F.PLACING),
    ("stop_string", F.PREFILLING),
}


WANTS_PROMPT = replace(request(), sampling_params=replace(request().sampling_params, prompt_logprobs=0))


def flight_in(state: FlightState) -> Flight:
    flight = Flight(request())
    flight.start()
    path: dict[FlightState, list[FlightEvent]] = {
        F.PLACING: [],
        F.PREFILLING: [placed("p1", "d1")],
        F.STREAMING: [placed("p1", "d1"), EVENTS["tokens"]],
        F.RETRYING: [placed("p1", "d1"), NodeGone("d1.1", "died")],
        F.FINISHED: [placed("p1", "d1"), EVENTS["stop"]],
        F.FAILED: [GiveUp(DeadlineExceeded("late"))],
        F.CANCELLED: [Cancel("gone")],
    }
    for event in path[state]:
        flight.handle(event)
    assert flight.state is state
    return flight


@pytest.mark.parametrize("state", FlightState)
@pytest.mark.parametrize("name", EVENTS)
def test_every_pair_of_state_and_event_moves_as_listed(state: FlightState, name: str) -> None:
    flight = flight_in(state)
    story, tokens = flight.history, flight.num_output_tokens
    if (name, state) in ILLEGAL:
        with pytest.raises(IllegalEvent, match="so far"):
            flight.handle(EVENTS[name])
        assert (flight.state, flight.history, flight.num_output_tokens) == (state, story, tokens)
        return
    effects = flight.handle(EVENTS[name])
    assert flight.state is EXPECTED.get(name, {}).get(state, state)
    ends = [effect for effect in effects if isinstance(effect, Finish | Fail | MovedAway)]
    assert len(ends) == int(flight.state in TERMINAL and state not in TERMINAL)
    if state in TERMINAL:
        assert effects == []
    if name.endswith("_back"):
        runs = state in (F.PREFILLING, F.STREAMING) and name != "stranger_back"
        adopted = [(effect.incarnation, effect.adopt.attempt) for effect in effects if isinstance(effect, AdoptLeg)]
        assert adopted == ([("p1.1" if name == "prefill_back" else "d1.1", key())] if runs else [])
        assert len(effects) == len(adopted), "nothing is placed, aborted or said to be over"
    if name == "cancel" and state in (F.PREFILLING, F.STREAMING):
        assert {e.incarnation for e in effects if isinstance(e, AbortLeg)} == {"p1.1", "d1.1"}


@pytest.mark.parametrize("is_taken", [True, False], ids=["taken", "lost on its way"])
@pytest.mark.parametrize(("policy", "needs_no_other"), [("reroute", False), ("recompute", True), ("fail", True)])
def test_a_decode_leg_that_has_its_prompt_continues_without_its_prefill_node(
    policy: str, needs_no_other: bool, is_taken: bool
) -> None:
    """The decode node would never learn of a leg that its prefill node never had."""
    goes_on = needs_no_other and is_taken
    flight = Flight(request(max_tokens=8))
    flight.start()
    decodes = replace(decode("d1"), on_transfer_failure=policy)
    flight.handle(Placed(Placement(prefill("p1"), decodes, IN_TURN)))
    if is_taken:
        flight.handle(reported("p1"))
    effects = flight.handle(NodeGone("p1.1", "died"))
    assert (flight.state is F.PREFILLING) is goes_on
    assert isinstance(effects[-1], LegEnded if goes_on else Place)
    if goes_on:
        tokens = flight.handle(reported("d1", tokens=(5, 6)))
        assert [(e.first_index, e.token_ids) for e in tokens if isinstance(e, EmitTokens)] == [(0, (5, 6))]


def test_a_prefill_node_is_needed_for_the_log_probabilities_of_the_prompt_whatever_the_decode_node_has() -> None:
    flight = Flight(WANTS_PROMPT)
    flight.start()
    flight.handle(Placed(Placement(prefill("p1"), replace(decode("d1"), on_transfer_failure="recompute"), IN_TURN)))
    flight.handle(reported("p1"))
    flight.handle(reported("d1", tokens=(10, 11)))
    assert isinstance(flight.handle(NodeGone("p1.1", "died"))[-1], Place)


def test_a_stream_is_continued_by_its_version_once_its_client_has_anything_of_it() -> None:
    of_prompt = [TokenLogprobs(token, -1.0, 1, ()) for token in (6, 7)]
    for asked, told, has_begun in (
        (request(), reported("d1"), False),
        (request(), reported("d1", tokens=(10,)), True),
        (WANTS_PROMPT, reported("d1", prompt_logprobs=of_prompt), True),
    ):
        flight = Flight(asked)
        flight.start()
        flight.handle(placed("-", "d1"))
        flight.handle(told)
        place = flight.handle(NodeGone("d1.1", "died"))[-1]
        assert isinstance(place, Place)
        assert place.origin == (Origin.of(decode("d1")) if has_begun else None)


def lost_until_it_ends(tokens_between: int, *, unrelated: int = 0, taken: bool = True) -> tuple[Flight, int]:
    """Lose the nodes of a flight after this number of tokens, together with others; return the number of losses."""
    flight = Flight(request(max_tokens=1_000_000))
    flight.start()
    others, num_tokens = {f"other{number}" for number in range(unrelated)}, 0
    for number in range(1000):
        if flight.is_over:
            return flight, number
        flight.handle(placed("-", f"d{number}"))
        if taken:
            flight.handle(Delta(f"d{number}.1", RequestDelta(flight.key)))
        if tokens_between:
            flight.handle(Delta(f"d{number}.1", RequestDelta(flight.key, num_tokens, (5,) * tokens_between)))
            num_tokens += tokens_between
        flight.handle(NodeGone(f"d{number}.1", "died", others | {f"d{number}.1"}))
    return flight, 1000


@pytest.mark.parametrize(
    ("tokens_between", "ends_after"), [(0, 3), (1, 3), (REFILL_TOKENS - 1, 3), (REFILL_TOKENS, 1000)]
)
def test_progress_refills_the_budget_of_attempts_and_without_it_a_request_ends(
    tokens_between: int, ends_after: int
) -> None:
    flight, num_losses = lost_until_it_ends(tokens_between)
    assert num_losses == ends_after
    assert flight.is_over is (ends_after < 1000)


@pytest.mark.parametrize("taken", [True, False])
def test_a_loss_together_with_unrelated_nodes_is_not_charged_but_bounded(taken: bool) -> None:
    assert lost_until_it_ends(0, unrelated=MIN_UNRELATED_NODES, taken=taken)[1] == MAX_UNRELATED_LOSSES + 1
    assert lost_until_it_ends(0, unrelated=MIN_UNRELATED_NODES - 1, taken=taken)[1] == (3 if taken else 9)


def test_losses_of_its_own_nodes_are_always_charged() -> None:
    flight = Flight(request())
    flight.start()
    lost: set[str] = set()
    for number in range(3):
        flight.handle(placed("-", f"d{number}"))
        flight.handle(reported(f"d{number}", number + 1))
        lost.add(f"d{number}.1")
        *_, end = flight.handle(NodeGone(f"d{number}.1", "died", frozenset(lost)))
    assert isinstance(end, Fail)
    assert isinstance(end.error, AttemptsExhausted)


def test_the_table_covers_all_live_states_and_steps() -> None:
    assert {state for state, _ in FLIGHT_TABLE} == set(LIVE)
    assert {step for _, step in FLIGHT_TABLE} == set(FlightStep)
    assert "PLACING --> PREFILLING: placed" in render_mermaid(FlightState.PLACING, FLIGHT_TABLE)


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32), length=st.integers(1, 8), quick=st.booleans())
def test_the_tokens_are_the_same_whichever_nodes_die(seed: int, length: int, quick: bool) -> None:
    """Nodes die, refuse and lose KV at random; both streams of a pair arrive in any mixture."""
    rng = Random(seed)
    truth = [100 + index for index in range(length)]
    flight = Flight(request(max_tokens=8))
    given_out: list[int] = []
    ends: list[Finish | Fail] = []
    todo: list[FlightEffect] = flight.start()
    streams: dict[str, list[RequestDelta]] = {}
    whole_streams: dict[str, list[RequestDelta]] = {}
    number = 0
    while True:
        for effect in todo:
            match effect:
                case Place():
                    number += 1
                    streams = {}
                    pair = placed("-" if rng.random() < 0.3 else f"p{number}", f"d{number}")
                    todo = flight.handle(pair)
                    break
                case SubmitLeg(incarnation, submit):
                    assert list(submit.output_token_ids) == given_out
                    whole_streams[incarnation] = script(submit, truth, rng)
                    streams[incarnation] = list(whole_streams[incarnation])
                case EmitTokens(first, tokens, _, _):
                    assert first == len(given_out)
                    given_out += tokens
                case Finish() | Fail():
                    ends.append(effect)
        else:
            todo = []
        if todo:
            continue
        if ends:
            break
        incarnation = rng.choice([name for name, script_left in streams.items() if script_left])
        if rng.random() < 0.06:
            todo = flight.handle(NodeGone(incarnation, "died"))
        elif rng.random() < 0.1:
            # Its link was cut: what was on its way is lost, and what the client does not have is told again.
            (adopted,) = flight.handle(LinkBack(incarnation)) or (None,)
            if isinstance(adopted, AdoptLeg):
                (known,) = adopted.adopt.num_tokens or (0,)
                assert known == len(given_out)
                streams[incarnation] = [from_token(delta, known) for delta in whole_streams[incarnation]]
        else:
            todo = feed(flight, Delta(incarnation, streams[incarnation].pop(0)), quick=quick)
    assert len(ends) == 1
    assert given_out == truth[: len(given_out)]
    if isinstance(ends[0], Finish):
        assert given_out == truth


@pytest.mark.parametrize("quick", [False, True])
def test_counts_of_drafts_are_those_of_all_attempts_that_made_the_output(quick: bool) -> None:
    flight = Flight(request(max_tokens=20))
    assert flight.draft_counts == NO_DRAFTS
    flight.start()
    feed(flight, placed("-", "d1"), quick=quick)

    steps: list[tuple[FlightEvent, DraftCounts]] = [
        (reported("d1", 1, 0, [10]), NO_DRAFTS),
        (reported("d1", 1, 1, [11, 12, 13], draft_counts=DraftCounts(4, 2)), DraftCounts(4, 2)),
        (reported("d1", 1, 4, [14]), DraftCounts(4, 2)),
        (reported("d1", 1, 5, [15], draft_counts=DraftCounts(6, 2)), DraftCounts(6, 2)),
        (LinkBack("d1.1"), DraftCounts(6, 2)),
        (reported("d1", 1, 6, [16], draft_counts=DraftCounts(6, 2)), DraftCounts(6, 2)),
        (NodeGone("d1.1", "died"), DraftCounts(6, 2)),
        (placed("-", "d2"), DraftCounts(6, 2)),
        (reported("d2", 2, 7, [17, 18], draft_counts=DraftCounts(1, 1)), DraftCounts(7, 3)),
        (reported("d1", 1, 7, [17, 18], draft_counts=DraftCounts(9, 4)), DraftCounts(7, 3)),
    ]
    for event, counts in steps:
        feed(flight, event, quick=quick)
        assert flight.draft_counts == counts


def test_counts_of_drafts_begin_anew_where_the_whole_output_is_computed_again() -> None:
    flight = begun("-", "d1", n=2)
    for index in range(2):
        flight.handle(reported("d1", 1, 0, [10, 11], sequence_index=index, draft_counts=DraftCounts(3, 1)))
    assert flight.draft_counts == DraftCounts(6, 2)
    flight.handle(NodeGone("d1.1", "died"))
    flight.handle(placed("-", "d2"))
    assert flight.draft_counts == NO_DRAFTS
    flight.handle(reported("d2", 2, 0, [10, 11], sequence_index=1, draft_counts=DraftCounts(2, 1)))
    assert flight.draft_counts == DraftCounts(2, 1)


def from_token(delta: RequestDelta, known: int) -> RequestDelta:
    """Return the delta without the tokens that the router already has, as an adopting node sends it."""
    skipped = min(max(0, known - delta.first_index), len(delta.token_ids))
    return replace(delta, first_index=delta.first_index + skipped, token_ids=delta.token_ids[skipped:])


def script(submit: Submit, truth: list[int], rng: Random) -> list[RequestDelta]:
    """Return the reports of one leg, in pieces of random size, sometimes with a failure at the end."""
    attempt, leg, given = submit.attempt.attempt, submit.leg.value, len(submit.output_token_ids)
    first, last = {"prefill": (given, given + 1), "decode": (given + 1, len(truth)), "whole": (given, len(truth))}[leg]
    first -= leg == "decode" and rng.random() < 0.5  # it tells what the prefill leg told, too
    deltas = []
    at = first
    while at < last:
        size = rng.randint(1, last - at)
        deltas.append(RequestDelta(key(attempt), at, tuple(truth[at : at + size])))
        at += size
    end = Outcome.HANDED_OFF if leg == "prefill" and len(truth) > given + 1 else Outcome.LENGTH
    for share, failure in ((0.2, Outcome.REFUSED), (0.1, Outcome.KV_LOST)):
        if rng.random() < share:
            return [*deltas[: rng.randint(0, len(deltas))], RequestDelta(key(attempt), outcome=failure)]
    return [*deltas, RequestDelta(key(attempt), last, outcome=end)]
