"""An answer that is continued from any position equals the whole answer: text, tokens, log-probabilities, ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from baton.messages.generation import Chunk, GenerateEvent, KnownText, Path, SequenceFinished
from baton.messages.node import Outcome, RequestDelta, StageTimings
from baton.messages.sampling import SamplingParams, TokenLogprobs
from router.admission.request import ValidRequest
from router.flight.answer import MAX_PARSED_TOKENS, Answer, ResumedAnswer, check_positions, replayed
from router.flight.flight_record import FlightRecord, placement_in_record
from router.flight.flight_sequence import FlightSequence
from router.flight.flight_table import EmitTokens, Finish, SequenceEnded
from tests.doubles.fake_tokenizer import FakeDetokenizer, FakeTokenizer
from tests.support.router_parts import decode, key, prefill


class PairDetokenizer(FakeDetokenizer):
    """Two tokens make a piece of text: that of the first one waits, like an unfinished character."""

    def __init__(self) -> None:
        super().__init__()
        self._held = ""

    def push(self, token_id: int) -> str:
        letter = chr(token_id)
        if not self._held:
            self._held = letter
            return ""
        piece, self._held = self._held + letter, ""
        return piece

    def finish(self) -> str:
        piece, self._held = self._held, ""
        return piece


class PairCodec(FakeTokenizer):
    def detokenizer(self, shown_tokens: Sequence[int] = (), context: Sequence[int] = ()) -> PairDetokenizer:
        return PairDetokenizer()


@dataclass
class Got:
    """Everything that a client has of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ends: set[tuple[str, int | str | None, int]] = field(default_factory=set)


Answers = dict[int, Got]
"""What a client has of each sequence, by its index."""


def collect(
    events: Sequence[GenerateEvent], had: Answers | None = None, positions: Sequence[int] = ()
) -> tuple[Answers, list[int]]:
    """Return the answer that the events add up to, and the positions after them.

    `had`: what the client has of them already, up to these positions.
    """
    found, at = had or {}, dict(enumerate(positions))
    for event in events:
        if isinstance(event, Chunk):
            assert event.first_index == at.get(event.sequence_index, 0), "missing, or repeated"
            at[event.sequence_index] = event.next_position
            got = found.setdefault(event.sequence_index, Got())
            got.token_ids += event.token_ids
            got.text += event.text
            got.logprobs += event.logprobs
        elif isinstance(event, SequenceFinished):
            got = found.setdefault(event.sequence_index, Got())
            got.ends.add((event.finish_reason, event.stop_reason, event.completion_tokens))
    return found, [at.get(index, 0) for index in range(1 + max(at, default=0))]


class Script:
    """The scripted reports for a request, in any grouping."""

    def __init__(
        self, request: ValidRequest, outputs: Sequence[Sequence[int]], *, stop_token: bool, logprobs: bool = True
    ) -> None:
        self.request = request
        self._outputs = outputs
        self._stop_token = stop_token
        self._logprobs = logprobs

    def play(self, answer: Answer, rng: Random, longest: int) -> list[GenerateEvent]:
        """Return all events of the answer."""
        events: list[GenerateEvent] = []
        at = [0] * len(self._outputs)
        live = list(range(len(self._outputs)))
        while live:
            index = rng.choice(live)
            output = self._outputs[index]
            last = min(len(output), at[index] + rng.randint(1, longest))
            tokens = tuple(output[at[index] : last])
            logprobs = tuple(TokenLogprobs(token, -0.1 * token, 1, ()) for token in tokens if self._logprobs)
            is_end = last == len(output)
            push = EmitTokens(at[index], tokens, logprobs, is_end and self._stop_token, index)
            events += answer.push(push)
            at[index] = last
            if is_end or answer.stop_string_found(index) is not None:
                live.remove(index)
                found = answer.stop_string_found(index)
                end: tuple[str, str | None] = ("stop", found) if found else ("length", None)
                if len(self._outputs) > 1:
                    events += answer.end_sequence(SequenceEnded(index, *end))
        return [*events, *answer.finish(Finish(*end, StageTimings(), Path("", "", 1, "")))]


@settings(max_examples=250)
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 4),
    extra=st.integers(0, 2),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=2),
    stop_token=st.booleans(),
    min_tokens=st.integers(0, 4),
)
def test_an_answer_cut_at_any_position_is_continued_completely(
    seed: int, n: int, extra: int, stops: list[str], stop_token: bool, min_tokens: int
) -> None:
    rng = Random(seed)
    params = SamplingParams(seed=1, max_tokens=12, min_tokens=min_tokens, n=n + extra, logprobs=0)
    request = ValidRequest(
        (1,), params, request_id="r", model="m", stop=tuple(stops), num_returned=n, wants_logprobs=True
    )
    outputs = [[ord(rng.choice("ab")) for _ in range(rng.randint(1, 10))] for _ in range(n + extra)]
    script = Script(request, outputs, stop_token=stop_token)
    events = script.play(Answer(PairCodec(), request), rng, rng.choice([1, 3]))
    whole, end = collect(events)
    for cut in range(len(events) + 1):
        had, positions = collect(events[:cut])
        rest = script.play(ResumedAnswer(PairCodec(), request, positions), rng, rng.choice([1, 2, 5]))
        assert collect(rest, had, positions)[0] == whole
    assert all(isinstance(e, SequenceFinished) for e in script.play(ResumedAnswer(PairCodec(), request, end), rng, 2))


@pytest.mark.parametrize("position", range(8))
def test_the_best_of_several_can_be_continued_at_any_token(position: int) -> None:
    """Although it is returned as a whole."""
    params = SamplingParams(seed=1, max_tokens=7, n=2, logprobs=0)
    request = ValidRequest((1,), params, request_id="r", model="m", stop=("zz",), num_returned=1)
    outputs = [list(b"abababz"), list(b"cdcdcdz")]
    script = Script(request, outputs, stop_token=False)
    whole, _ = collect(script.play(Answer(PairCodec(), request), Random(1), 3))
    rest = script.play(ResumedAnswer(PairCodec(), request, [position]), Random(1), 3)
    assert whole[0].text == "abababz"
    # Two tokens make a piece, and the last one comes with the rest.
    done = position - position % 2
    had = {0: Got(whole[0].token_ids[:position], whole[0].text[:done])}
    assert collect(rest, had, [position])[0] == whole


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), stops=st.lists(st.text("ab", min_size=1, max_size=3), max_size=1))
def test_a_live_answer_is_replayed_from_any_position(seed: int, stops: list[str]) -> None:
    """Also in mid-stream: what follows continues after what was replayed."""
    rng = Random(seed)
    output = [ord(rng.choice("ab")) for _ in range(8)]
    cut, position = rng.randint(1, 8), rng.randint(0, 8)
    request = ValidRequest((1,), SamplingParams(seed=1, max_tokens=8), request_id="r", model="m", stop=tuple(stops))
    sequence = FlightSequence(0)
    sequence.take(RequestDelta(key(), 0, tuple(output[:cut])))
    answer = ResumedAnswer(PairCodec(), request, [position])
    events = list(replayed(answer, [sequence], ()))
    if cut < 8 and answer.stop_string_found(0) is None:
        events += answer.push(EmitTokens(cut, tuple(output[cut:]), (), False))
    events += answer.finish(Finish("length", None, StageTimings(), Path("", "", 1, "")))
    whole = Script(request, [output], stop_token=False, logprobs=False).play(Answer(PairCodec(), request), rng, 1)
    behind = [event for event in whole if not isinstance(event, Chunk) or event.next_position > position]
    assert collect(events, None, [position])[0] == collect(behind, None, [position])[0]


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32), stops=st.lists(st.text("ab", min_size=1, max_size=3), max_size=2), best=st.booleans()
)
def test_a_reader_that_parses_gets_the_text_before_its_position(seed: int, stops: list[str], best: bool) -> None:
    rng = Random(seed)
    outputs = [[ord(rng.choice("ab")) for _ in range(rng.randint(1, 8))] for _ in range(2)]
    params = SamplingParams(seed=1, max_tokens=8, n=2, logprobs=0 if best else None)
    request = ValidRequest(
        (1,),
        params,
        request_id="r",
        model="m",
        stop=tuple(stops),
        num_returned=1 if best else 2,
        wants_logprobs=best,
        is_parsed=True,
    )
    script = Script(request, outputs, stop_token=False)
    whole, end = collect(script.play(Answer(PairCodec(), request), rng, 3))
    positions = [rng.randint(0, most) for most in end]
    for index, position in enumerate(positions):
        events = script.play(ResumedAnswer(PairCodec(), request, positions), rng, rng.choice([1, 2, 5]))
        chunks = [event for event in events if isinstance(event, Chunk) and event.sequence_index == index]
        assert "".join(chunk.text for chunk in chunks) == whole[index].text
        known = [isinstance(chunk, KnownText) for chunk in chunks]
        assert known == sorted(known, reverse=True)
        assert not any(chunk.token_ids for chunk in chunks if isinstance(chunk, KnownText))
        told = [chunk.known_token_ids if isinstance(chunk, KnownText) else chunk.token_ids for chunk in chunks]
        assert [token for tokens in told for token in tokens] == whole[index].token_ids
        assert all(
            (chunk.next_position <= position) or not is_known for chunk, is_known in zip(chunks, known, strict=True)
        )
        assert [token for chunk in chunks for token in chunk.token_ids] == whole[index].token_ids[position:]


def test_a_reader_that_parses_learns_that_a_last_token_without_text_is_known() -> None:
    """Else it would take the text that it holds at the end for a part of what its client has."""
    request = ValidRequest((1,), SamplingParams(seed=1, max_tokens=8), request_id="r", model="m", is_parsed=True)
    answer = ResumedAnswer(PairCodec(), request, [3])
    tokens = [EmitTokens(place, (97 + place,), (), place == 2, 0) for place in range(3)]
    events = [event for one in tokens for event in answer.push(one)]
    assert all(isinstance(event, KnownText) for event in events)
    assert [event.next_position for event in events if isinstance(event, Chunk)][-1] == 3


@pytest.mark.parametrize("best", [False, True])
def test_a_reader_that_parses_gets_a_long_answer_in_pieces(best: bool) -> None:
    params = SamplingParams(seed=1, max_tokens=2000, n=2, logprobs=0 if best else None)
    request = ValidRequest((1,), params, request_id="r", model="m", num_returned=1 if best else 2, is_parsed=True)
    script = Script(request, [list(b"ab" * 500), list(b"cd" * 500)], stop_token=False)
    resumed = script.play(ResumedAnswer(PairCodec(), request, [300, 0]), Random(1), 2000)
    for events in [resumed, script.play(Answer(PairCodec(), request), Random(1), 9)]:
        chunks = [event for event in events if isinstance(event, Chunk) and event.sequence_index == 0]
        assert all(len(chunk.token_ids) <= MAX_PARSED_TOKENS for chunk in chunks)
        assert all(len(chunk.text) <= MAX_PARSED_TOKENS + 1 for chunk in chunks)
        assert "".join(chunk.text for chunk in chunks) in ("ab" * 500, "cd" * 500)


def test_ended_sequences_are_replayed_with_their_end() -> None:
    request = ValidRequest((1,), SamplingParams(seed=1, max_tokens=8, n=2), request_id="r", model="m", num_returned=2)
    first, second = FlightSequence(0), FlightSequence(1)
    first.take(RequestDelta(key(), 0, (97, 98, 33), outcome=Outcome.STOP, stop_token_id=33))
    first.close("stop", 33)
    second.take(RequestDelta(key(), 0, (97, 98), sequence_index=1))
    events = replayed(ResumedAnswer(PairCodec(), request, [2, 1]), [first, second], ())
    assert events == [
        Chunk(2, (33,), ""),
        SequenceFinished(0, "stop", 33, 3),
        Chunk(1, (98,), "ab", (), 1),
    ]


@pytest.mark.parametrize(
    ("positions", "says"),
    [([-1], "must be 0 to 9, not -1"), ([10], "must be 0 to 9, not 10"), ([0, 0, 0], "names 3 sequences; there are 2")],
)
def test_impossible_positions_are_refused(positions: list[int], says: str) -> None:
    request = ValidRequest((1,), SamplingParams(seed=1, max_tokens=8, n=2), request_id="r", model="m", num_returned=2)
    check_positions(request, [9, 0])
    check_positions(request, [])
    with pytest.raises(InvalidRequest, match=f"next_token_index: {says}"):
        check_positions(request, positions)


def test_an_attempt_can_be_adopted_only_with_its_decode_node() -> None:
    request = ValidRequest((1,), SamplingParams(seed=1), request_id="r", model="m")
    record = FlightRecord(request, 7, 1, "p1.1", "d1.1", 0, "router-0.a", 0.0)
    both = {node.incarnation: node for node in (prefill("p1"), decode("d1"))}
    found = placement_in_record(record, [], both)
    assert found is not None
    assert (found.prefill, found.decode) == (prefill("p1"), decode("d1"))
    alone = placement_in_record(record, [], {"d1.1": decode("d1")})
    assert alone is not None
    assert alone.prefill is None
    assert placement_in_record(record, [], {"p1.1": prefill("p1")}) is None
    assert placement_in_record(record, [], {"d1.2": decode("d1", run=2)}) is None


@pytest.mark.parametrize(
    ("logprobs", "position", "may_be_asked"), [(None, 0, True), (0, 4, False), (0, 5, True), (2, 9, True)]
)
def test_an_attempt_is_not_adopted_if_given_tokens_lack_log_probabilities(
    logprobs: int | None, position: int, may_be_asked: bool
) -> None:
    request = ValidRequest((1,), SamplingParams(seed=1, logprobs=logprobs), request_id="r", model="m")
    record = FlightRecord(request, 7, 2, "", "d1.1", 5, "router-0.a", 0.0)
    assert (placement_in_record(record, [position], {"d1.1": decode("d1")}) is not None) is may_be_asked
