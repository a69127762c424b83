"""The service between routers and engine, with a real engine whose turns the tests call."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from baton.engine.batch import ComputedStep, EngineCoreOutput, StepTimes
from baton.engine.connector import KVTransferOutput, LostKV
from baton.engine.sequences.beams import BeamSearch
from baton.engine.sequences.sequence_group import sequence_seed
from baton.errors import Draining, TransferCause
from baton.messages.ids import AttemptKey, Peer
from baton.messages.node import (
    HEARTBEAT_S,
    Abort,
    Adopt,
    Leg,
    Outcome,
    RequestDelta,
    Role,
    StageTimings,
    StepFigures,
    StepReport,
    Submit,
)
from baton.messages.node_model import GENERATES, Capability
from baton.messages.node_report import (
    FailedProbe,
    HandoffReport,
    HandoffSide,
    OpenHandoff,
    ProbeFault,
    RefusedLink,
    TraceStep,
)
from baton.messages.pooling import Pooling, PoolingParams
from baton.messages.request_limits import MAX_AUDIO_BYTES
from baton.messages.sampling import SamplingParams
from baton.messages.spans import ContentKind, EncoderContent, Span, digest_of_rows, source_spans
from baton.node.attempts.attempt_times import TransferFigures
from baton.node.attempts.submit_check import engine_request, objection
from baton.node.driver import StepNews
from baton.node.leftovers import GIVE_UP_AFTER_S
from baton.node.reports.logs import StepLog
from baton.node.router_streams import LOAD_EVERY_S, MAX_QUEUED_REPORTS, Port
from baton.wire.credentials import MAX_MESSAGE_BYTES
from tests.doubles.fake_clock import FakeClock
from tests.doubles.fake_runner import expected_beams, expected_embedding, expected_tokens
from tests.support.node_rig import (
    DESCRIPTION,
    KEY,
    PROMPT,
    SOURCE,
    VOCAB,
    NodeRig,
    deltas,
    queued_reports,
    submit,
    tokens,
)
from tests.support.requests import changed
from tests.support.virtual_time import LoopClock, run_virtually, virtually

PARAMS = SamplingParams(temperature=0.0, seed=3, max_tokens=4)


async def test_a_request_ends_once_and_leaves_nothing(rig: NodeRig, port: Port) -> None:
    rig.complete(port)
    got = await deltas(port)
    assert tokens(got) == expected_tokens(PROMPT, 4, seed=3, vocab_size=VOCAB)
    assert [delta.outcome for delta in got] == [None, None, None, Outcome.LENGTH]
    await rig.check_idle(port)


async def test_each_router_is_told_of_its_own_requests_only(rig: NodeRig) -> None:
    first, second = rig.service.open_port("router-0"), rig.service.open_port("router-1")
    other = AttemptKey("req", 1, 8)
    rig.submit(first)
    rig.complete(second, other)
    assert {delta.attempt for delta in await deltas(first)} == {KEY}
    assert {delta.attempt for delta in await deltas(second)} == {other}


async def test_a_router_without_requests_is_told_of_the_load_a_few_times_a_second_and_when_work_ends(
    rig: NodeRig,
) -> None:
    asking, watching = rig.service.open_port("router-0"), rig.service.open_port("router-1")
    await queued_reports(watching)
    rig.submit(asking, sampling_params=SamplingParams(temperature=0.0, seed=3, max_tokens=9))
    told = []
    for _ in range(9):
        rig.driver.turn()
        told.append([report.load.running for report in await queued_reports(watching)])
        rig.manual_clock.advance(0.4 * LOAD_EVERY_S)
    rig.driver.run()
    told.append([report.load.running for report in await queued_reports(watching)])
    assert told == [[1], [], [], [1], [], [], [1], [], [0], []]
    assert len(await deltas(asking)) == 9, "who asked hears of every step"


async def test_steps_are_kept_for_a_timeline_and_returned_once(rig: NodeRig, port: Port) -> None:
    rig.begin(port)
    first = rig.service.steps(0)
    rig.driver.run()
    rest = rig.service.steps(first[-1].seq)
    assert [step.seq for step in (*first, *rest)] == [1, 2, 3, 4]
    figures = [step.figures for step in (*first, *rest)]
    assert [one.prefill_tokens for one in figures] == [len(PROMPT), 0, 0, 0]
    assert [one.decode_sequences for one in figures] == [0, 1, 1, 1]
    assert {step.monotonic_ns for step in (*first, *rest)} == {int(rig.clock.monotonic() * 1e9)}
    assert [step.goes_on for step in (*first, *rest)] == [True, True, True, False]
    assert rig.service.steps(4) == []


def test_a_full_step_log_returns_the_steps_that_it_still_has() -> None:
    log, most = StepLog(3), 2**63
    steps = [
        TraceStep(
            number, number * 10**9, StepFigures(number / 7, number, most - number, most, number, 9, 8), number % 2 == 0
        )
        for number in range(1, 6)
    ]
    assert log.after(0) == []
    for number, step in enumerate(steps):
        log.record(step.monotonic_ns / 1e9, step.figures, step.goes_on)
        assert log.after(0) == steps[max(0, number - 2) : number + 1]
    assert log.after(4) == steps[4:]
    assert log.after(5) == log.after(2**64) == []


@pytest.mark.parametrize("turns", [0, 1, 3])
@pytest.mark.parametrize("beams", [{}, {"max_tokens": 50, "n": 2, "beam_width": 3}], ids=["plain", "beams"])
async def test_an_abort_ends_it_and_tells_the_role(rig: NodeRig, port: Port, turns: int, beams: dict[str, Any]) -> None:
    rig.begin(port, sampling_params=replace(PARAMS, **beams), turns=turns)
    port.receive(Abort(KEY, "client left"))
    rig.driver.run()
    assert (await deltas(port))[-1].outcome is Outcome.ABORTED
    assert rig.role.aborted == [KEY]
    assert not rig.scheduler.requests
    await rig.check_idle(port)


def several(n: int, **fields: Any) -> Submit:
    params = SamplingParams(temperature=0.0, seed=3, max_tokens=4, n=n)
    return submit(sampling_params=params, **fields)


class Ticking(FakeClock):
    """A clock that advances with each reading."""

    def monotonic(self) -> float:
        self.advance(0.001)
        return super().monotonic()


async def test_an_attempt_of_several_sequences_ends_with_the_last_of_them() -> None:
    rig = NodeRig(clock=Ticking())
    port = rig.service.open_port("router-0")
    port.receive(several(3))
    while rig.scheduler.requests or not port.num_queued:
        assert KEY in rig.service.running_for(port)
        rig.driver.turn()
    rig.driver.run()
    got = await deltas(port)
    # The last delta has the time of the whole attempt.
    assert got[-1].timings is not None
    assert got[-1].timings.decode_ms > 0.0
    for index in range(3):
        seed = sequence_seed(3, index)
        own = [delta for delta in got if delta.sequence_index == index]
        assert tokens(own) == expected_tokens(PROMPT, 4, seed=seed, vocab_size=VOCAB)
        assert own[-1].outcome is Outcome.LENGTH
    assert {delta.attempt for delta in got} == {KEY}
    others = [delta for delta in got if delta.sequence_index]
    assert len(others) == 8
    assert all((delta.timings is None) == (delta.outcome is None) for delta in others)
    await rig.check_idle(port)


async def test_one_sequence_or_all_are_aborted(rig: NodeRig, port: Port) -> None:
    port.receive(several(3))
    rig.driver.turns(3)
    port.receive(Abort(KEY, "its text is over", 0))
    rig.driver.turn()
    assert KEY in rig.service.running_for(port)
    assert len(rig.scheduler.requests) == 2
    got = await deltas(port)
    assert [delta.sequence_index for delta in got if delta.outcome is Outcome.ABORTED] == [0]
    assert rig.role.aborted == []
    port.receive(Abort(KEY, "client left"))
    rig.driver.run()
    assert not rig.scheduler.requests
    assert not rig.service.running_for(port)
    assert rig.role.aborted == [KEY]
    await rig.service.draining.wait_idle()


async def test_a_beam_search_is_reported_as_its_best_sequences(rig: NodeRig, port: Port) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, n=2, beam_width=3)
    port.receive(submit(sampling_params=params))
    rig.driver.run()
    got = await deltas(port)
    best = expected_beams(PROMPT, BeamSearch(3, frozenset(), 5), vocab_size=VOCAB)
    assert [(delta.sequence_index, delta.first_index, delta.token_ids) for delta in got] == [
        (0, 0, best[0]),
        (1, 0, best[1]),
    ]
    assert {delta.outcome for delta in got} == {Outcome.LENGTH}
    assert {event.attempt for event in rig.log.after(0)} == {KEY}
    await rig.check_idle(port)


async def test_an_embedding_comes_with_the_end_and_is_replayed_when_adopted() -> None:
    rig = NodeRig(orphan_grace_s=10.0)
    port = rig.service.open_port("router-0", "router-0.a")
    rig.complete(port, leg=Leg.EMBED)
    (end,) = await deltas(port)
    assert (end.outcome, end.embedding, end.token_ids) == (Outcome.STOP, expected_embedding(PROMPT), [])
    assert end.timings is not None
    assert not rig.service.running_for(port)
    other = rig.service.open_port("router-1", "router-1.a")
    other.receive(Adopt(KEY))
    assert (await deltas(other))[-1] == replace(end, token_ids=())
    rig.service.close()


async def test_embeddings_too_large_for_one_report_come_in_several(rig: NodeRig) -> None:
    port, other = rig.service.open_port("router-0"), rig.service.open_port("router-1")
    assert len(await queued_reports(port)) == len(await queued_reports(other)) == 1
    keys = [AttemptKey(f"e{number}", 1) for number in range(12)]
    ends = [EngineCoreOutput(key, (), 0, outcome=Outcome.STOP, embedding=bytes(3 << 19)) for key in keys]
    step = ComputedStep(StepFigures(500.0, 12, 0, 0), 1.0, goes_on=False)
    stats = rig.scheduler.make_stats()
    rig.service.on_step(StepNews({port.client_index: ends}, (), stats, StepTimes(), step=step))
    reports = await queued_reports(port)
    assert [delta.attempt for report in reports for delta in report.deltas] == keys
    assert max(sum(len(delta.embedding) for delta in report.deltas) for report in reports) < MAX_MESSAGE_BYTES / 2
    assert [report.step is not None for report in reports] == [False] * (len(reports) - 1) + [True]
    assert len(await queued_reports(other)) == 1
    assert all(report.deltas for report in reports)


def test_a_node_without_embeddings_says_so() -> None:
    assert objection(submit(leg=Leg.EMBED), DESCRIPTION) == "leg: the model of decode-0 can't embed"


def given(start: int, length: int, number: float = 0.5, **changes: Any) -> Span:
    rows = np.full((length, 4), number, np.float32).tobytes()
    return replace(Span(start, length, digest_of_rows("float32", length, 4, rows), "float32", rows), **changes)


UNSOUND_SPANS: dict[str, tuple[list[Span], str]] = {
    "a start that is negative": ([given(-1, 2)], "is not behind 0"),
    "an end behind the prompt": ([given(3, 4)], "is not behind 0"),
    "no length": ([given(1, 0)], "is not behind 0"),
    "an overlap": ([given(0, 2), given(1, 1)], "is not behind 2"),
    "tokens in it": ([given(2, 2)], "there are tokens"),
    "rows that are missing": ([given(0, 2, rows=b"")], "0 bytes are not 2 rows"),
    "rows of another width": ([given(0, 2, rows=bytes(24))], "24 bytes are not 2 rows"),
    "an unknown dtype": ([given(0, 2, dtype="int8" * 99)], "numbers of int8"),
    "NaN": ([given(0, 2, float("nan"))], "not finite"),
    "the digest of others": ([given(0, 2, digest=given(0, 2, 0.25).digest)], "is not that of its rows"),
    "many": ([given(0, 1)] * 65, "at most 64"),
}


@pytest.mark.parametrize("name", UNSOUND_SPANS)
def test_unsound_spans_are_refused(name: str) -> None:
    spans, reason = UNSOUND_SPANS[name]
    can = frozenset((Capability.GENERATE, Capability.PROMPT_EMBEDS))
    node = replace(DESCRIPTION, capabilities=can, row_width=4)
    sound = changed(submit(), prompt_token_ids=[0, 0, 0, 9, 0, 0], spans=[given(0, 3), given(4, 2)])
    assert objection(sound, node) is None
    assert reason in (objection(changed(sound, spans=spans), node) or "")
    assert "can't prompt_embeds" in (objection(sound, replace(node, capabilities=GENERATES)) or "")
    with_logprobs = changed(sound, sampling_params=replace(sound.spec.sampling_params, prompt_logprobs=0))
    assert "go with no prompt_logprobs" in (objection(with_logprobs, node) or "")


IMAGE = EncoderContent.of(b"an image")


def encoded(start: int, length: int, first_row: int = 0, columns: int = 0, digest: str = IMAGE.digest) -> Span:
    return Span(start, length, digest, is_encoded=True, first_row=first_row, columns=columns)


UNSOUND_IMAGES: dict[str, tuple[list[Span], list[EncoderContent], str]] = {
    "none of its digest": ([encoded(0, 3, digest="0" * 64)], [IMAGE], "no row of one that"),
    "none at all": ([encoded(0, 3)], [], "no row of one that"),
    "another digest than its data's": ([encoded(0, 3)], [EncoderContent(IMAGE.digest, b"x")], "not that of its data"),
    "rows that don't follow": ([encoded(0, 3), encoded(4, 2, first_row=2)], [IMAGE], "no row of one that"),
    "rows without a first one": ([encoded(0, 3, first_row=1)], [IMAGE], "no row of one that"),
    "a grid that is not whole": ([encoded(0, 3, columns=2)], [IMAGE], "no grid of 2 columns"),
    "rows of its own": ([replace(encoded(0, 3), rows=b"1234")], [IMAGE], "no row of one that"),
    "many": ([encoded(0, 3)], [IMAGE] * 65, "there are 65"),
}


TEXT = EncoderContent.of(bytes(4 * 50), ContentKind.TEXT)
SPEECH = EncoderContent.of(bytes(64), ContentKind.SPEECH)
UNSOUND_SOURCES: dict[str, tuple[EncoderContent, dict[str, Any], str]] = {
    "rows behind those of a text": (TEXT, {"spans": [encoded(0, 64, digest=TEXT.digest)]}, "not those of 50 rows"),
    "fewer rows than a text has": (TEXT, {"spans": source_spans(TEXT.digest, 40)}, "not those of 50 rows"),
    "rows behind a token": (
        TEXT,
        {"spans": [replace(span, start=span.start + 1) for span in source_spans(TEXT.digest, 50)]},
        "not those of 50 rows",
    ),
    "speech that does not fill its positions": (
        SPEECH,
        {"spans": [encoded(0, 50, digest=SPEECH.digest)]},
        "not those of 50 rows",
    ),
    "no span": (TEXT, {"spans": []}, "not those of 50 rows"),
    "no span of speech": (SPEECH, {"spans": []}, "not those of 0 rows"),
    "no token for the decoder": (TEXT, {"prompt_token_ids": [0] * 64}, "no token for the decoder"),
    "a second content": (TEXT, {"contents": [TEXT, EncoderContent.of(bytes(4), ContentKind.TEXT)]}, "goes alone"),
    "an image beside it": (TEXT, {"contents": [TEXT, IMAGE]}, "goes alone"),
    "an image before it": (TEXT, {"contents": [IMAGE, TEXT]}, "goes alone"),
}


@pytest.mark.parametrize("name", UNSOUND_SOURCES)
def test_unsound_inputs_of_a_decoder_are_refused(name: str) -> None:
    content, wrong, reason = UNSOUND_SOURCES[name]
    can = frozenset((Capability.GENERATE, Capability.TRANSCRIBE, Capability.IMAGE))
    node = replace(DESCRIPTION, capabilities=can)
    spans = source_spans(content.digest, 50)
    sound = changed(submit(), prompt_token_ids=[0] * 64 + [9, 9], spans=spans, contents=[content])
    assert objection(sound, node) is None
    assert reason in (objection(changed(sound, **wrong), node) or "")


def test_a_node_takes_no_more_speech_than_a_request_may_have() -> None:
    node = replace(DESCRIPTION, capabilities=frozenset((Capability.TRANSCRIBE,)))
    for num_bytes, reason in ((MAX_AUDIO_BYTES, None), (MAX_AUDIO_BYTES + 2, "at most 960000 are taken")):
        speech = EncoderContent.of(bytes(num_bytes), ContentKind.SPEECH)
        spans = source_spans(speech.digest, 50)
        why = objection(changed(submit(), prompt_token_ids=[0] * 64 + [9], spans=spans, contents=[speech]), node)
        assert why is None if reason is None else reason in (why or "")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"second_start": 64}, "no token before the transcript"),
        ({"second_start": 68}, "behind the prompt"),
        ({"num_rows": 0}, "must be 1 to 50"),
        ({"num_rows": 51}, "must be 1 to 50"),
    ],
)
def test_unsound_alignments_are_refused(wrong: Mapping[str, Any], reason: str) -> None:
    node = replace(DESCRIPTION, capabilities=frozenset((Capability.TRANSCRIBE, Capability.ALIGN)))
    speech = EncoderContent.of(bytes(32), ContentKind.SPEECH)
    align = PoolingParams(Pooling.ALIGN, second_start=66, num_rows=50)
    spans = source_spans(speech.digest, 50)
    begun = changed(submit(leg=Leg.EMBED), prompt_token_ids=[0] * 64 + [9, 9, 9], pooling=align)
    sound = changed(begun, spans=spans, contents=[speech])
    assert objection(sound, node) is None
    assert reason in (objection(changed(sound, pooling=replace(align, **wrong)), node) or "")
    assert "needs the speech" in (objection(begun, node) or "")
    unable = replace(node, capabilities=frozenset((Capability.TRANSCRIBE,)))
    assert "can't align" in (objection(sound, unable) or "")


@pytest.mark.parametrize("name", UNSOUND_IMAGES)
def test_unsound_images_are_refused(name: str) -> None:
    spans, images, reason = UNSOUND_IMAGES[name]
    node = replace(DESCRIPTION, capabilities=frozenset((Capability.GENERATE, Capability.IMAGE)), row_width=4)
    parts = [encoded(0, 3), encoded(4, 2, first_row=3)]
    sound = changed(submit(), prompt_token_ids=[0, 0, 0, 9, 0, 0], spans=parts, contents=[IMAGE])
    assert objection(sound, node) is None
    assert reason in (objection(changed(sound, spans=spans, contents=images), node) or "")
    assert "can't image" in (objection(sound, replace(node, capabilities=GENERATES)) or "")


@pytest.mark.parametrize("leg", [Leg.PREFILL, Leg.WHOLE])
@pytest.mark.parametrize("size", [-1, 0, 1, 4, 6, 8, 1 << 31])
def test_the_blocks_of_the_reader_must_fit(leg: Leg, size: int) -> None:
    node = replace(DESCRIPTION, role=Role.PREFILL, block_size=4)
    why = objection(changed(submit(leg=leg), reader_block_size=size), node) or ""
    fits = size in (1, 4, 8, 1 << 31) and leg is Leg.PREFILL
    assert why.startswith("reader_block_size: ") == (not fits and size != 0)


def test_kv_of_other_numerics_is_named_for_decode_legs_and_shortly() -> None:
    decode = changed(submit(leg=Leg.DECODE), kv_source=Peer("p", "p.1", "h:1"))
    assert objection(changed(decode, kv_bits="x" * 64), DESCRIPTION) is None
    for unsound in (changed(decode, kv_bits="x" * 65), changed(submit(leg=Leg.WHOLE), kv_bits="x")):
        assert (objection(unsound, DESCRIPTION) or "").startswith("kv_bits: ")


def test_a_turn_is_a_number_of_seconds_and_may_be_missing() -> None:
    for turn, expected in ((None, 0.0), (0.0, 0.0), (-1.5, -1.5), (2.5, 2.5)):
        sound = changed(submit(), turn=turn)
        assert objection(sound, DESCRIPTION) is None
        assert engine_request(sound, frozenset()).turn_in_s == expected
    for turn in (math.nan, math.inf):
        assert (objection(changed(submit(), turn=turn), DESCRIPTION) or "").startswith("turn: ")


async def test_a_prefill_leg_is_over_with_its_only_sequence() -> None:
    rig = NodeRig(Role.PREFILL)
    port = rig.service.open_port("router-0")
    port.receive(several(3, leg=Leg.PREFILL))
    rig.driver.run()
    assert [delta.outcome for delta in await deltas(port)] == [Outcome.HANDED_OFF]
    assert not rig.service.running_for(port)


async def test_an_abort_after_the_end_reaches_the_role_and_changes_nothing_else() -> None:
    rig = NodeRig(Role.PREFILL)
    port = rig.service.open_port("router-0")
    rig.complete(port, leg=Leg.PREFILL)
    assert (await deltas(port))[-1].outcome is Outcome.HANDED_OFF
    port.receive(Abort(KEY, "the decode leg died"))
    rig.driver.run()
    assert rig.role.aborted == [KEY]
    assert not await deltas(port)


async def test_a_node_is_idle_only_when_no_block_is_leased() -> None:
    rig = NodeRig(Role.PREFILL)
    port = rig.service.open_port("router-0")
    rig.complete(port, leg=Leg.PREFILL)
    idle = asyncio.create_task(rig.service.draining.wait_idle())
    await asyncio.wait((idle,), timeout=0)
    assert not idle.done()
    rig.driver.tell_transfer(KVTransferOutput(released=frozenset({str(KEY)})))
    rig.driver.run()
    await idle


@virtually
async def test_a_drain_gives_up_on_reads_that_do_not_end_and_says_what_it_left() -> None:
    """It does so when nothing else was left for a while; a lease whose reader is queued is waited for without bound."""
    rig = NodeRig(Role.PREFILL, clock=LoopClock())
    port, loop = rig.service.open_port("router-0"), asyncio.get_running_loop()
    rig.complete(port, leg=Leg.PREFILL)
    lease = OpenHandoff(KEY, HandoffSide.SENDER, "READING", "decode-0", "decode-0.x", 2, 9.0)
    rig.role.reported = HandoffReport(open=[lease])
    idle = asyncio.create_task(rig.service.draining.wait_idle())
    await asyncio.sleep(1000)
    assert not idle.done()
    suspect = replace(lease, state="SUSPECT")
    rig.role.reported = HandoffReport(open=[suspect])
    suspect_at = loop.time()
    assert await idle == [suspect]
    assert GIVE_UP_AFTER_S <= loop.time() - suspect_at <= GIVE_UP_AFTER_S + 2 * HEARTBEAT_S
    left = [event for event in rig.log.after(0) if event.name == "drain_gave_up"]
    assert [(event.attempt, event.value, event.detail) for event in left] == [(KEY, 2, "SUSPECT decode-0")]
    story = f"the drain gave up on 2 blocks whose reads do not end: {KEY} SUSPECT with decode-0, 2 blocks, 9 s"
    assert [report.notice for report in await queued_reports(port) if report.notice] == [story]


async def test_a_submit_that_comes_twice_runs_once_and_stays_abortable() -> None:
    rig = NodeRig()
    port = rig.service.open_port("router-0")
    rig.begin(port)
    rig.begin(port)
    assert all(delta.outcome is None for delta in await deltas(port))
    assert KEY in rig.service.running_for(port)
    port.close()
    rig.driver.run()
    assert rig.role.aborted == [KEY]
    assert not rig.scheduler.requests


async def test_a_router_can_not_abort_or_submit_the_attempt_of_another(rig: NodeRig) -> None:
    owner, stranger = rig.service.open_port("router-0"), rig.service.open_port("router-1")
    rig.begin(owner)
    rig.submit(stranger)
    assert [delta.outcome for delta in await deltas(stranger)] == [Outcome.ERROR]
    stranger.receive(Abort(KEY, "not mine"))
    stranger.close()
    rig.driver.run()
    assert tokens(await deltas(owner)) == expected_tokens(PROMPT, 4, seed=3, vocab_size=VOCAB)
    assert rig.role.aborted == []


async def test_attempts_of_a_router_that_detaches_are_aborted_without_a_grace(rig: NodeRig) -> None:
    port, other = rig.service.open_port("router-0"), rig.service.open_port("router-1")
    rig.submit(port)
    stays = AttemptKey("stays", 1, 9)
    rig.begin(other, stays)
    port.close()
    port.close()
    rig.driver.run()
    assert rig.role.aborted == [KEY]
    assert tokens(await deltas(other)) == expected_tokens(PROMPT, 4, seed=3, vocab_size=VOCAB)
    port.receive(submit(AttemptKey("late", 1)))
    rig.driver.run()
    assert not rig.scheduler.requests
    await rig.service.draining.wait_idle()


async def test_a_router_that_does_not_read_is_cut_off_alone(rig: NodeRig) -> None:
    slow, other = rig.service.open_port("router-0"), rig.service.open_port("router-1")
    rig.begin(slow)
    for _ in range(MAX_QUEUED_REPORTS):
        slow.push(StepReport((), rig.service.report().load))
    rig.complete(other, AttemptKey("stays", 1, 9))
    assert rig.role.aborted == [KEY]
    assert slow.num_queued == MAX_QUEUED_REPORTS + 1
    assert (await deltas(other))[-1].outcome is Outcome.LENGTH
    assert [report async for report in slow.reports()], "what was queued is still to be had"


STOPS_AT_9 = replace(PARAMS, stop_token_ids=frozenset({9}))
BAD = [
    ("prompt", {"prompt_token_ids": ()}),
    ("prompt", {"prompt_token_ids": (1, VOCAB)}),
    ("prompt", {"prompt_token_ids": (-1,)}),
    ("leg", {"leg": Leg.PREFILL}),
    ("kv_source", {"leg": Leg.DECODE}),
    ("kv_source", {"kv_source": SOURCE}),
    ("kv_source", {"leg": Leg.DECODE, "kv_source": replace(SOURCE, incarnation="")}),
    ("kv_source", {"leg": Leg.DECODE, "kv_source": replace(SOURCE, address="")}),
    ("max_tokens", {"sampling_params": replace(PARAMS, max_tokens=0)}),
    ("temperature", {"sampling_params": replace(PARAMS, temperature=math.nan)}),
    ("temperature", {"sampling_params": replace(PARAMS, temperature=-1.0)}),
    ("top_p", {"sampling_params": replace(PARAMS, top_p=0.0)}),
    ("top_k", {"sampling_params": replace(PARAMS, top_k=-2)}),
    ("min_p", {"sampling_params": replace(PARAMS, min_p=1.5)}),
    ("presence_penalty", {"sampling_params": replace(PARAMS, presence_penalty=math.inf)}),
    ("frequency_penalty", {"sampling_params": replace(PARAMS, frequency_penalty=math.nan)}),
    ("repetition_penalty", {"sampling_params": replace(PARAMS, repetition_penalty=0.0)}),
    ("logit_bias", {"sampling_params": replace(PARAMS, logit_bias={VOCAB: 1.0})}),
    ("logit_bias", {"sampling_params": replace(PARAMS, logit_bias={1: math.inf})}),
    ("allowed_token_ids", {"sampling_params": replace(PARAMS, allowed_token_ids=(VOCAB,))}),
    ("allowed_token_ids", {"sampling_params": replace(PARAMS, allowed_token_ids=(0,) * 4097)}),
    ("bad_words_token_ids", {"sampling_params": replace(PARAMS, bad_words_token_ids=((1, VOCAB),))}),
    ("bad_words_token_ids", {"sampling_params": replace(PARAMS, bad_words_token_ids=((),))}),
    ("bad_words_token_ids", {"sampling_params": replace(PARAMS, bad_words_token_ids=((1,) * 8705,))}),
    ("logprobs", {"sampling_params": replace(PARAMS, logprobs=VOCAB + 1)}),
    ("prompt_logprobs", {"sampling_params": replace(PARAMS, prompt_logprobs=21)}),
    ("prompt_logprobs", {"sampling_params": replace(PARAMS, beam_width=2, prompt_logprobs=1)}),
    ("n", {"sampling_params": replace(PARAMS, n=129)}),
    ("n", {"sampling_params": replace(PARAMS, n=0)}),
    ("n", {"sampling_params": replace(PARAMS, n=4, beam_width=3)}),
    ("beam_width", {"sampling_params": replace(PARAMS, beam_width=9)}),
    ("length_penalty", {"sampling_params": replace(PARAMS, beam_width=3, length_penalty=math.nan)}),
    ("output_token_ids", {"output_token_ids": (1, VOCAB)}),
    ("output_token_ids", {"output_token_ids": (1,), "sampling_params": replace(PARAMS, n=2)}),
    ("output_token_ids", {"output_token_ids": (1,), "sampling_params": replace(PARAMS, beam_width=2)}),
    ("output_token_ids: token 1 ended the output", {"output_token_ids": (1, 9), "sampling_params": STOPS_AT_9}),
    ("output_token_ids", {"output_token_ids": (1, 2, 3, 4)}),
    ("output_token_ids", {"output_token_ids": (1,), "prompt_token_ids": (1,) * 127}),
    ("leg", {"leg": Leg.EMBED, "output_token_ids": (1,)}),
    ("leg", {"leg": Leg.EMBED, "sampling_params": replace(PARAMS, n=2)}),
    ("leg", {"leg": Leg.EMBED, "sampling_params": replace(PARAMS, beam_width=2)}),
    ("leg", {"leg": Leg.EMBED, "sampling_params": replace(PARAMS, json_schema="{}")}),
    ("kv_source", {"leg": Leg.EMBED, "kv_source": SOURCE}),
    ("json_schema", {"sampling_params": replace(PARAMS, beam_width=3, json_schema="{}")}),
    ("json_schema", {"sampling_params": replace(PARAMS, json_schema=" " * (64 * 1024 + 1))}),
]


@pytest.mark.parametrize(("field", "values"), BAD)
async def test_values_that_would_fail_the_engine_are_refused_with_the_fields_name(
    field: str, values: dict[str, Any]
) -> None:
    rig = NodeRig()
    port = rig.service.open_port("router-0")
    rig.submit(port, **values)
    (delta,) = await deltas(port)
    assert delta.attempt == KEY
    assert delta.outcome is Outcome.ERROR
    assert delta.error.startswith(field)
    rig.driver.run()
    assert not rig.service.running_for(port)
    assert not rig.log.after(0), "it reached the engine"
    await rig.service.draining.wait_idle()


@pytest.mark.parametrize("request_id", ["", "x" * 65, "a b", "a\0"])
async def test_an_invalid_request_id_is_refused(request_id: str) -> None:
    rig = NodeRig()
    port = rig.service.open_port("router-0")
    rig.submit(port, attempt=KEY._replace(request_id=request_id))
    (delta,) = await deltas(port)
    assert (delta.outcome, delta.error) == (Outcome.ERROR, "request_id: is not a valid request id")
    await rig.service.draining.wait_idle()


async def test_an_attempt_with_earlier_output_continues_after_it() -> None:
    rig = NodeRig()
    port = rig.service.open_port("router-0")
    undisturbed = expected_tokens(PROMPT, 9, seed=3, vocab_size=VOCAB)
    # Before min_tokens no token ends the output.
    params = replace(PARAMS, max_tokens=9, min_tokens=9, stop_token_ids=frozenset(undisturbed))
    rig.complete(port, output_token_ids=undisturbed[:5], sampling_params=params)
    told = await deltas(port)
    assert (told[0].first_index, tokens(told)) == (5, undisturbed[5:])
    assert told[0].timings is not None
    assert told[-1].outcome is Outcome.STOP


async def test_an_attempt_is_reported_as_begun_before_the_engine_gets_it() -> None:
    rig = NodeRig()
    port = rig.service.open_port("router-0")
    rig.submit(port)
    assert (await queued_reports(port))[-1].deltas == (RequestDelta(KEY),)
    rig.driver.run()


async def test_a_prompt_that_can_never_fit_ends_ignored() -> None:
    rig = NodeRig()
    port = rig.service.open_port("router-0")
    rig.complete(port, prompt_token_ids=(1,) * 200)
    (delta,) = await deltas(port)
    assert delta.outcome is Outcome.IGNORED
    assert "200 tokens" in delta.error
    assert not rig.service.running_for(port)


async def test_absurd_lengths_end_at_the_models_length() -> None:
    rig = NodeRig()
    port = rig.service.open_port("router-0")
    rig.submit(port, sampling_params=replace(PARAMS, max_tokens=2**32 - 1))
    rig.driver.run(limit=200)
    got = await deltas(port)
    assert got[-1].outcome is Outcome.LENGTH
    assert len(tokens(got)) == 128 - len(PROMPT)


async def test_draining_is_reported_at_once_and_refuses_new_work() -> None:
    rig = NodeRig()
    port = rig.service.open_port("router-0")
    rig.begin(port)
    await queued_reports(port)
    rig.service.draining.refuse_new_work()
    (report,) = await queued_reports(port)
    assert report.load.draining, "the routers would learn of it from the next step only"
    rig.submit(port, AttemptKey("late", 1))
    assert [delta.outcome for delta in await deltas(port)] == [Outcome.REFUSED]
    rig.driver.run()
    reports = await queued_reports(port)
    assert reports[-1].load.draining
    assert reports[-1].deltas[-1].outcome is Outcome.LENGTH
    await rig.service.draining.wait_idle()


async def test_a_node_that_has_closed_accepts_no_more_routers() -> None:
    rig = NodeRig()
    port = rig.service.open_port("router-0")
    rig.service.close()
    assert len([report async for report in port.reports()]) == 1
    with pytest.raises(Draining):
        rig.service.open_port("router-0")


async def test_a_message_that_can_t_be_read_ends_its_own_attempt_alone() -> None:
    rig = NodeRig()
    port = rig.service.open_port("router-0")
    rig.submit(port)
    other = AttemptKey("other", 1)
    port.refuse(other, "submit.leg: unknown leg")
    (delta,) = await deltas(port)
    assert (delta.attempt, delta.outcome, delta.error) == (other, Outcome.ERROR, "submit.leg: unknown leg")
    rig.driver.run()
    assert (await deltas(port))[-1].outcome is Outcome.LENGTH


async def test_the_wait_in_the_engines_inbox_counts_as_queueing(rig: NodeRig, port: Port) -> None:
    """A step of half a second delays the inbox that long; for the client that is time in the queue."""
    rig.submit(port)
    rig.manual_clock.advance(0.5)
    rig.driver.turn()
    timings = (await deltas(port))[0].timings
    assert timings is not None
    assert timings.queue_ms == pytest.approx(500.0)


async def test_a_load_report_counts_each_request_once(rig: NodeRig, port: Port) -> None:
    for number in range(6):
        rig.submit(port, AttemptKey(f"r{number}", 1))
    rig.begin(port, leg=Leg.DECODE, kv_source=SOURCE)
    load = rig.service.report().load
    assert (load.running, load.waiting, load.waiting_for_remote_kvs) == (4, 2, 1), "KV comes without a seat"
    port.receive(Abort(AttemptKey("r5", 1), "x"))
    port.receive(Abort(AttemptKey("r4", 1), "x"))
    rig.driver.turn()
    load = rig.service.report().load
    assert (load.running, load.waiting, load.waiting_for_remote_kvs) == (4, 0, 1)


async def test_reports_have_the_figures_of_a_step_and_the_work_that_is_left(rig: NodeRig) -> None:
    port, other = rig.service.open_port("router-0"), rig.service.open_port("router-1")
    rig.begin(port)
    load = rig.service.report().load
    assert (load.uncomputed_tokens, load.context_tokens) == (0, len(PROMPT))
    rig.manual_clock.advance(2 * LOAD_EVERY_S)
    rig.driver.turn()
    for heard_by in (port, other):
        steps = [report.step for report in await queued_reports(heard_by) if report.step is not None]
        assert [(step.prefill_tokens, step.decode_sequences, step.decode_context_tokens) for step in steps] == [
            (len(PROMPT), 0, 0),
            (0, 1, len(PROMPT)),
        ]
    port.receive(Abort(KEY, "x"))
    rig.driver.turn()
    assert [report.step for report in await queued_reports(other)] == [None], "nothing was computed"


async def test_a_decode_legs_timings_come_with_its_first_tokens(rig: NodeRig, port: Port) -> None:
    rig.begin(port, leg=Leg.DECODE, kv_source=SOURCE)
    of_prompt = StageTimings(queue_ms=4.0, cached_tokens=16)
    rig.role.moved[KEY] = TransferFigures(4096, 1.5, of_prompt)
    rig.driver.tell_transfer(KVTransferOutput(failed={str(KEY): LostKV(TransferCause.PEER_GONE, "peer gone")}))
    rig.driver.run()
    (delta,) = await deltas(port)
    assert delta.outcome is Outcome.KV_LOST
    assert (delta.error, delta.transfer_cause) == ("peer gone", TransferCause.PEER_GONE)
    assert delta.timings is not None
    assert (delta.timings.kv_bytes, delta.timings.transfer_ms) == (4096, 1.5)
    assert (delta.prompt_timings, rig.role.timed[KEY]) == (of_prompt, delta.timings)
    assert not rig.service.running_for(port)
    rig.driver.tell_transfer(KVTransferOutput(released=frozenset({str(KEY)})))
    rig.driver.run()
    await rig.service.draining.wait_idle()


async def test_drain_asks_the_process_and_trace_returns_the_events(rig: NodeRig, port: Port) -> None:
    rig.service.drain()
    assert rig.drained == 1
    rig.complete(port)
    names = [event.name for event in rig.service.trace(0)]
    assert names[:2] == ["queued", "scheduled"]
    assert names[-1] == "finished"
    assert rig.service.trace(rig.service.trace(0)[-1].seq) == []


async def _refused_link() -> None:
    rig = NodeRig()
    port = rig.service.open_port("router")
    beating = asyncio.create_task(rig.service.heartbeat())

    async def notices(of: Port, seconds: float) -> list[str]:
        await asyncio.sleep(seconds)
        return [report.notice for report in await queued_reports(of) if report.notice is not None]

    assert await notices(port, 3.5) == []
    refused = RefusedLink("prefill-0", "layout_mismatch", "layouts differ", 1.0, 1)
    rig.role.reported = HandoffReport(refused_links=[refused])
    assert await notices(port, 3) == ["layouts differ"]
    late = rig.service.open_port("late")
    assert await notices(late, 3) == ["layouts differ"]
    rig.role.reported = HandoffReport(refused_links=[replace(refused, age_s=301.0)])
    assert await notices(port, 3) == [""]
    assert rig.service.report().handoff.refused_links[0].story == "layouts differ"
    # A failed probe stands, however old it is.
    failed = FailedProbe("prefill-0", ProbeFault.TIMED_OUT, "bytes did not arrive", 1000.0, 9)
    rig.role.reported = HandoffReport(refused_links=[refused], failed_probes=[failed])
    assert await notices(port, 3) == ["KvProbeFailed: bytes did not arrive"]
    rig.role.reported = HandoffReport()
    assert await notices(port, 3) == [""]
    beating.cancel()


def test_a_refused_link_is_reported_once_until_it_is_old_or_a_link_opens() -> None:
    run_virtually(_refused_link())
