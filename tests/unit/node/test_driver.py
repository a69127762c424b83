"""The engine's thread: it sleeps, wakes, executes commands in order, refuses duplicates, and reports its death."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from baton.clock import SystemClock
from baton.engine.batch import EngineCoreEvent, EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from baton.engine.connector import ArrivedKV, BlockFate, KVConnector, KVTransferOutput, LostKV
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.kv_cache.events import KVEventBatch
from baton.engine.request import Request
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import SchedulerConfig
from baton.errors import CacheInUse, TransferCause
from baton.messages.kv_cache import AllBlocksCleared
from baton.messages.node import Leg, Outcome
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.messages.spans import EncoderContent, Span
from baton.node.driver import EngineDriver, StepNews
from baton.node.encoding import RowSource
from baton.node.serve import Outbox
from baton.runner import SimulatedSpec
from baton.runner.execution.step_thread import StepThread
from baton.runner.simulated import SimulatedRunner
from tests.doubles.fake_connector import FakeConnector
from tests.doubles.fake_row_source import FakeRowSource
from tests.doubles.fake_runner import rows_of
from tests.support.engine_rig import SOURCE, EngineRig, prompt_of
from tests.support.requests import request_of
from tests.support.simulated_oracle import expected_tokens
from tests.support.step_gate import StepGate

LONG_S = 30.0


class DriverRig:
    """A running driver; `news` has all that it has published."""

    def __init__(self, ahead: bool = False, rows: RowSource | None = None, **limits: Any) -> None:
        self.engine = EngineRig(**limits)
        self.news: queue.SimpleQueue[StepNews] = queue.SimpleQueue()
        self.crashes: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.driver = EngineDriver(
            self.engine.scheduler,
            self.engine.runner,
            self.news.put,
            self.crashes.put,
            executor=StepThread() if ahead else None,
            rows=rows,
        )

    def until_end(self, request_id: str) -> list[EngineCoreOutput]:
        """The outputs of a request up to its end."""
        seen = []
        while True:
            for outputs in self.news.get(timeout=LONG_S).outputs.values():
                for output in outputs:
                    if output.attempt.request_id == request_id:
                        seen.append(output)
                        if output.outcome is not None:
                            return seen


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def rig(request: pytest.FixtureRequest) -> Iterator[DriverRig]:
    rig = DriverRig(request.param)
    rig.driver.start()
    yield rig
    rig.driver.stop()
    check_no_thread_is_left()


def check_no_thread_is_left() -> None:
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("baton")]


def request(request_id: str, client_index: int = 0, **fields: object) -> Request:
    params = SamplingParams(max_tokens=3)
    return request_of(request_id, prompt_of(6), params, client_index=client_index, **fields)


def test_the_driver_runs_submitted_requests_and_sleeps_in_between(rig: DriverRig) -> None:
    for number in range(3):
        rig.driver.submit(request(f"r{number}"))
        outputs = rig.until_end(f"r{number}")
        assert sum(len(output.new_token_ids) for output in outputs) == 3
        assert outputs[-1].outcome is Outcome.LENGTH
    assert rig.news.empty(), "it turned although there was nothing to do"


def test_a_second_request_with_a_live_id_ends_alone(rig: DriverRig) -> None:
    rig.driver.submit(request("r", client_index=1, leg=Leg.DECODE, kv_source=SOURCE))
    rig.driver.submit(request("r", client_index=2))
    while 2 not in (news := rig.news.get(timeout=LONG_S)).outputs:
        assert not news.outputs
    (refused,) = news.outputs[2]
    assert refused.outcome is Outcome.ERROR
    assert "here already" in str(refused.error)
    rig.driver.tell_transfer(KVTransferOutput(failed={"r": LostKV(TransferCause.PEER_GONE, "gone")}))
    assert rig.until_end("r")[-1].outcome is Outcome.KV_LOST


def test_commands_are_executed_in_order(rig: DriverRig) -> None:
    """An abort right after its submit ends the request, one before it does not, and unknown ids are ignored."""
    rig.driver.abort(["r", "nobody"])
    rig.driver.submit(request("r", leg=Leg.DECODE, kv_source=SOURCE))
    rig.driver.abort(["r"])
    assert rig.until_end("r")[-1].outcome is Outcome.ABORTED
    rig.driver.abort(["r"])
    rig.driver.submit(request("after"))
    assert rig.until_end("after")[-1].outcome is Outcome.LENGTH


def test_released_blocks_wake_a_request_that_waits_for_blocks(rig: DriverRig) -> None:
    big = Request("big", RequestSpec(prompt_of(200), SamplingParams(max_tokens=1)), leg=Leg.PREFILL)
    rig.driver.submit(big)
    rig.until_end("big")
    waits = Request("waits", RequestSpec(prompt_of(200, 5), SamplingParams(max_tokens=1)))
    rig.driver.submit(waits)
    assert rig.news.get(timeout=LONG_S).stats.num_waiting == 1
    rig.driver.tell_transfer(KVTransferOutput(released=frozenset({"big"})))
    assert rig.until_end("waits")[-1].outcome is Outcome.LENGTH


def test_news_have_events_and_the_load_after_the_turn(rig: DriverRig) -> None:
    rig.driver.submit(request("r"))
    events: list[EngineCoreEvent] = []
    stats = None
    while not any(event.type.value == "finished" for event in events):
        news = rig.news.get(timeout=LONG_S)
        events += news.events
        stats = news.stats
    assert [event.type.value for event in events if event.type.value != "chunk_computed"] == [
        "queued",
        "scheduled",
        "first_token",
        "finished",
    ]
    assert stats is not None
    assert (stats.num_running, stats.free_blocks) == (0, stats.total_blocks)


def test_a_runner_that_raises_fails_its_step_and_the_engine_goes_on(rig: DriverRig) -> None:
    rig.engine.runner.raise_next = RuntimeError("out of luck")
    rig.driver.submit(request("r"))
    assert "out of luck" in str(rig.until_end("r")[-1].error)
    rig.driver.submit(request("next"))
    assert rig.until_end("next")[-1].outcome is Outcome.LENGTH
    assert rig.crashes.empty()


def test_a_scheduler_that_raises_is_reported_once_and_ends_the_thread(
    rig: DriverRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> SchedulerOutput:
        raise ValueError("the books disagree")

    monkeypatch.setattr(rig.engine.scheduler, "schedule", broken)
    rig.driver.submit(request("r"))
    assert str(rig.crashes.get(timeout=LONG_S)) == "the books disagree"
    rig.driver.abort(["r"])
    rig.driver.stop()
    assert rig.crashes.empty()


@pytest.mark.parametrize("ahead", [False, True])
def test_stop_does_not_wait_for_remaining_work(ahead: bool) -> None:
    rig = DriverRig(ahead)
    rig.driver.start()
    rig.driver.submit(request("r", leg=Leg.DECODE, kv_source=SOURCE))
    rig.driver.stop()
    rig.driver.stop()
    rig.driver.submit(request("late"))


def test_deferred_actions_of_a_step_are_posted_after_its_news() -> None:
    """An offer wakes another node: the step's first token must not wait for that, nor the offer for other work."""
    order: queue.SimpleQueue[str] = queue.SimpleQueue()
    outbox = Outbox(lambda action: action())

    class Connector(FakeConnector):
        def blocks_computed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
            outbox.add_work(lambda: order.put("done at last"))
            outbox.add(lambda: order.put("left by the step"))

    engine = EngineRig(connector=Connector())
    outbox.add(lambda: order.put("left before"))

    def publish(news: StepNews) -> None:
        if news.outputs:
            order.put("news")

    driver = EngineDriver(engine.scheduler, engine.runner, publish, lambda error: None, flush=outbox.flush)
    driver.start()
    driver.submit(request("r", leg=Leg.PREFILL))
    expected = ["left before", "news", "left by the step", "done at last"]
    assert [order.get(timeout=LONG_S) for _ in expected] == expected
    driver.stop()


def test_routers_hear_that_a_command_has_ended_a_request_before_other_nodes_do() -> None:
    """A node that waits for its KV would tell its router that this was lost, who would compute the prompt again."""
    order: queue.SimpleQueue[str] = queue.SimpleQueue()
    outbox = Outbox(lambda action: action())

    class Connector(FakeConnector):
        def request_finished(self, request: Request, block_ids: Sequence[int], transferring: bool) -> BlockFate:
            outbox.add(lambda: order.put("withdrawn"))
            return super().request_finished(request, block_ids, transferring)

    def publish(news: StepNews) -> None:
        if news.outputs:
            order.put("news")

    engine = EngineRig(connector=Connector())
    driver = EngineDriver(engine.scheduler, engine.runner, publish, lambda error: None, flush=outbox.flush)
    driver.start()
    driver.submit(request("r", leg=Leg.DECODE, kv_source=SOURCE))
    driver.abort(["r"])
    assert [order.get(timeout=LONG_S) for _ in range(2)] == ["news", "withdrawn"]
    driver.stop()


SPEC = SimulatedSpec(num_blocks=64, block_size=4, vocab_size=997, max_model_len=256)


class WatchedThread(StepThread):
    """A step thread that notes when a step was submitted."""

    def __init__(self) -> None:
        super().__init__()
        self.submitted: queue.SimpleQueue[None] = queue.SimpleQueue()

    def submit(self, execute: Callable[[], ModelRunnerOutput]) -> Callable[[], ModelRunnerOutput]:
        result = super().submit(execute)
        self.submitted.put(None)
        return result


class GatedRig:
    """A driver of a simulated runner whose steps wait at a gate; by default it schedules the next step meanwhile."""

    def __init__(self, allowed: int, ahead: bool = True, connector: KVConnector | None = None) -> None:
        self.gate = StepGate(allowed)
        self.thread = WatchedThread()
        runner = SimulatedRunner(replace(SPEC, sleep=self.gate))
        fields = CacheKeyFields.of(runner.model, runner.layout)
        self.scheduler = Scheduler(SchedulerConfig(64, block_size=4), fields, SystemClock(), connector)
        self.outputs: queue.SimpleQueue[EngineCoreOutput] = queue.SimpleQueue()
        self.driver = EngineDriver(
            self.scheduler, runner, self.publish, lambda error: None, executor=self.thread if ahead else None
        )
        self.driver.start()

    def publish(self, news: StepNews) -> None:
        for batch in news.outputs.values():
            for output in batch:
                self.outputs.put(output)


def test_a_step_is_decided_and_another_published_while_the_runner_computes() -> None:
    rig = GatedRig(allowed=0)
    rig.driver.submit(request("r"))
    for _ in range(2):
        rig.thread.submitted.get(timeout=LONG_S)
    assert rig.outputs.empty()
    rig.gate.allow(1)
    assert rig.outputs.get(timeout=LONG_S).first_index == 0
    rig.thread.submitted.get(timeout=LONG_S)
    rig.gate.allow(None)
    assert [rig.outputs.get(timeout=LONG_S).first_index for _ in range(2)] == [1, 2]
    rig.driver.stop()
    check_no_thread_is_left()


def test_an_abort_that_comes_while_the_runner_computes_ends_its_request_alone() -> None:
    rig = GatedRig(allowed=1)
    rig.driver.submit(request("aborted"))
    rig.driver.submit(request("other"))
    rig.gate.wait_for_step(2)
    rig.driver.abort(["aborted"])
    rig.gate.allow(None)
    ends: dict[str, Outcome] = {}
    tokens: list[int] = []
    while len(ends) < 2:
        output = rig.outputs.get(timeout=LONG_S)
        if output.attempt.request_id == "other":
            tokens += output.new_token_ids
        if output.outcome is not None:
            ends[output.attempt.request_id] = output.outcome
    rig.driver.stop()
    assert ends == {"aborted": Outcome.ABORTED, "other": Outcome.LENGTH}
    assert tokens == expected_tokens(prompt_of(6), SamplingParams(max_tokens=3), SPEC)


@pytest.mark.parametrize("ahead", [False, True])
def test_an_end_that_needs_no_step_is_reported_at_once(ahead: bool) -> None:
    rig = GatedRig(allowed=1, ahead=ahead)
    rig.driver.submit(request("runs"))
    assert rig.outputs.get(timeout=LONG_S).attempt.request_id == "runs"
    rig.gate.wait_for_step(2)
    # They are executed between the second step and the third, which the gate does not let pass.
    rig.driver.submit(Request("huge", RequestSpec(prompt_of(4000), SamplingParams())))
    rig.driver.submit(request("aborted", leg=Leg.DECODE, kv_source=SOURCE))
    rig.driver.abort(["aborted"])
    rig.gate.allow(2)
    ends: dict[str, Outcome] = {}
    while len(ends) < 2:
        output = rig.outputs.get(timeout=LONG_S)
        if output.outcome is not None:
            ends[output.attempt.request_id] = output.outcome
    assert ends == {"huge": Outcome.IGNORED, "aborted": Outcome.ABORTED}
    rig.gate.allow(None)
    rig.driver.stop()


def test_kv_that_arrives_during_a_step_is_used_in_the_next_one() -> None:
    rig = GatedRig(allowed=1, ahead=False, connector=FakeConnector())
    rig.driver.submit(request("d", leg=Leg.DECODE, kv_source=SOURCE))
    rig.driver.submit(Request("stream", RequestSpec(prompt_of(6), SamplingParams(max_tokens=20))))
    assert rig.outputs.get(timeout=LONG_S).attempt.request_id == "stream"
    rig.gate.wait_for_step(2)
    # It is executed between the second step and the third.
    rig.driver.tell_transfer(KVTransferOutput(arrived={"d": ArrivedKV((7,))}))
    rig.gate.allow(3)
    told = [rig.outputs.get(timeout=LONG_S) for _ in range(3)]
    assert [(output.attempt.request_id, output.first_index) for output in told] == [
        ("stream", 1),
        ("stream", 2),
        ("d", 0),
    ]
    assert len(told[-1].new_token_ids) == 2, "the one that came and the one that it drew"
    rig.gate.allow(None)
    rig.driver.stop()


def test_stop_waits_for_the_step_in_flight_and_for_nothing_else() -> None:
    rig = GatedRig(allowed=1)
    rig.driver.submit(request("r"))
    rig.gate.wait_for_step(2)
    stopping = threading.Thread(target=rig.driver.stop)
    stopping.start()
    rig.gate.allow(None)
    stopping.join(LONG_S)
    assert not stopping.is_alive()
    check_no_thread_is_left()


def test_the_prefix_cache_is_reset_between_two_steps(rig: DriverRig) -> None:
    answers: queue.SimpleQueue[int | CacheInUse] = queue.SimpleQueue()
    rig.driver.watch_kv_cache()
    rig.driver.submit(request("r"))
    rig.until_end("r")
    rig.driver.reset_prefix_cache(answers.put)
    assert answers.get(timeout=LONG_S) == 2
    cleared: list[object] = []
    while AllBlocksCleared() not in cleared:
        told = rig.news.get(timeout=LONG_S).kv_cache
        cleared += told.events if isinstance(told, KVEventBatch) else ()


def test_a_prefix_cache_in_use_is_not_reset_and_the_error_says_what_uses_it(rig: DriverRig) -> None:
    answers: queue.SimpleQueue[int | CacheInUse] = queue.SimpleQueue()
    rig.driver.submit(request("p", leg=Leg.PREFILL))
    rig.until_end("p")
    rig.driver.submit(
        Request("d", RequestSpec(prompt_of(6, 9), SamplingParams(max_tokens=3)), leg=Leg.DECODE, kv_source=SOURCE)
    )
    while "d" not in rig.engine.connector.loads:
        rig.news.get(timeout=LONG_S)
    rig.driver.reset_prefix_cache(answers.put)
    refused = answers.get(timeout=LONG_S)
    assert isinstance(refused, CacheInUse)
    assert str(refused).endswith(
        "blocks are in use: 2 held by requests or a step that has not ended, 2 offered to decode nodes"
    )
    rig.driver.abort(["d"])
    rig.until_end("d")
    rig.driver.reset_prefix_cache(answers.put)
    assert str(answers.get(timeout=LONG_S)).endswith("2 offered to decode nodes, 2 that a transfer may still write to")
    rig.driver.tell_transfer(KVTransferOutput(released=frozenset({"p", "d"})))
    rig.driver.reset_prefix_cache(answers.put)
    assert answers.get(timeout=LONG_S) == 1


class EncodingRig(DriverRig):
    """A driver whose requests have an image before their text; `source` is where rows may come from."""

    def __init__(self) -> None:
        self.source = FakeRowSource()
        super().__init__(rows=self.source, num_encoder_rows=4)

    def submit(self, request_id: str, image: bytes = b"a", *, is_held: bool = True) -> str:
        """Submit a request with an image, of which another node has rows; return the image's digest."""
        content = EncoderContent.of(image)
        held = replace(content, held_by=SOURCE if is_held else None)
        span = Span(0, 4, content.digest, is_encoded=True)
        self.driver.submit(request(request_id, spans=[span], contents=[held]))
        return content.digest

    def counts(self) -> tuple[int, int]:
        """How many images were encoded here, and of how many the rows were fetched."""
        cache = self.engine.scheduler.encoder_cache
        return (cache.num_encoded, cache.num_fetched)


@pytest.fixture
def encoding() -> Iterator[EncodingRig]:
    rig = EncodingRig()
    rig.driver.start()
    yield rig
    rig.driver.stop()
    # The driver does not wait for what the encoder is doing.
    for thread in threading.enumerate():
        if thread.name.startswith("baton-encoder"):
            thread.join(LONG_S)
    check_no_thread_is_left()


@pytest.mark.parametrize(("num_rows", "counts"), [(4, (0, 1)), (3, (1, 0))], ids=["fit", "do not fit"])
def test_rows_that_another_node_has_made_are_made_again_only_if_they_can_not_be_used(
    encoding: EncodingRig, num_rows: int, counts: tuple[int, int]
) -> None:
    digest = EncoderContent.of(b"a").digest
    encoding.source.rows[digest] = rows_of(digest, num_rows)
    for name in ("r", "again"):
        encoding.submit(name)
        assert encoding.until_end(name)[-1].outcome is Outcome.LENGTH
    assert encoding.counts() == counts
    assert encoding.engine.runner.encoder.num_encoded == counts[0]
    assert encoding.source.asked == [digest]


def test_rows_that_nobody_gives_or_nobody_has_are_made_here(encoding: EncodingRig) -> None:
    digest = encoding.submit("r")
    assert encoding.until_end("r")[-1].outcome is Outcome.LENGTH
    assert encoding.source.asked == [digest]
    encoding.submit("s", b"b", is_held=False)
    assert encoding.until_end("s")[-1].outcome is Outcome.LENGTH
    assert encoding.source.asked == [digest]
    assert encoding.counts() == (2, 0)
    assert encoding.source.encoded_rows == [4, 4]


@pytest.mark.parametrize("has_rows", [False, True])
def test_an_answer_that_nobody_waits_for_any_more_changes_nothing(encoding: EncodingRig, has_rows: bool) -> None:
    encoding.source.waits = True
    digest = encoding.submit("r")
    if has_rows:
        encoding.source.rows[digest] = rows_of(digest, 4)
    while not encoding.source.asked:
        encoding.news.get(timeout=LONG_S)
    encoding.driver.abort(["r"])
    encoding.until_end("r")
    encoding.source.answer()
    encoding.source.waits = False
    other = encoding.submit("s", b"b")
    assert encoding.until_end("s")[-1].outcome is Outcome.LENGTH
    assert encoding.counts() == (1, 0)
    assert encoding.engine.runner.encoder.num_encoded == 1
    assert encoding.engine.runner.encoder.encoded.keys() == {other}


def test_an_input_is_encoded_once_although_a_fetch_for_an_ended_request_fails_meanwhile(
    encoding: EncodingRig,
) -> None:
    encoder_is_free, answers = threading.Event(), queue.SimpleQueue[int | CacheInUse]()
    encoding.driver._encoder._pool.submit(encoder_is_free.wait, LONG_S)
    encoding.source.waits = True
    digest = encoding.submit("r")
    while not encoding.source.asked:
        encoding.news.get(timeout=LONG_S)
    encoding.driver.abort(["r"])
    encoding.until_end("r")
    encoding.submit("s", is_held=False)
    while not encoding.engine.scheduler.encoder_cache.awaits(digest):
        encoding.news.get(timeout=LONG_S)
    encoding.source.answer()
    encoding.driver.reset_prefix_cache(answers.put)
    answers.get(timeout=LONG_S)
    encoder_is_free.set()
    encoding.until_end("s")
    encoding.submit("t", b"b", is_held=False)
    encoding.until_end("t")
    assert encoding.engine.runner.encoder.num_encoded == 2
