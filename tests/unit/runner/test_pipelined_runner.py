"""The order in which a model in stages computes micro-batches, with stages that take as long as the test wants."""

from __future__ import annotations

import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from baton.engine.batch import ModelRunnerOutput, SchedulerOutput
from baton.engine.core import EngineCore
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request
from baton.engine.runner import LazyExecutor, RunnerLost
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.runner.backends.kernel_choice import choose_operations
from baton.runner.execution.input_batch import FlatBatch
from baton.runner.execution.step_results import StepResults
from baton.runner.loading import load_runner
from baton.runner.model.decoder import HiddenAndLogits
from baton.runner.model.random_model import write_random_model
from baton.runner.model.transformer import Transformer
from baton.runner.model.weights import load_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.parts import Stage
from baton.runner.pipelined_runner import PipelinedModelRunner
from baton.runner.spec import CacheSpec, TorchSpec, WeightSpec
from tests.doubles.fake_clock import FakeClock
from tests.doubles.fake_stages import FakeStages
from tests.oracle.test_token_exact import make_prompts
from tests.support.tiny_models import TINY_MODELS


class SlowStages(Transformer):
    """Stands for a model in stages: its results come only to those who wait for them."""

    def __init__(self, directory: Path, num_stages: int) -> None:
        super().__init__(
            load_model(directory, WeightSpec("float32")), choose_operations(1), 16, CacheSpec(num_blocks=64), 1
        )
        self.stage = Stage(0, num_stages)
        self.log: list[str] = []
        """The begin and the end of micro-batches with the number of their rows, and `copy`."""
        self._begun: list[HiddenAndLogits] = []
        self._is_ready = False

    @property
    def depths(self) -> list[int]:
        """How many micro-batches were computed after each event."""
        depth, depths = 0, []
        for event in self.log:
            depth += {"begin": 1, "end": -1}.get(event.split()[0], 0)
            depths.append(depth)
        return depths

    @property
    def can_begin(self) -> bool:
        return len(self._begun) < 2 * self.stage.count

    def begin(self, batch: FlatBatch, logits_rows: npt.NDArray[np.int64] | None, wants_hidden: bool) -> None:
        self.log.append(f"begin {batch.query_start[-1]}")
        self._begun.append(super().compute_with_hidden(batch, logits_rows))

    def wait(self, other: socket.socket | None = None, timeout: float | None = None) -> bool:
        # Results come to those who wait, and not to those who just look.
        self._is_ready |= timeout is None
        return self._is_ready

    def take_result(self) -> HiddenAndLogits:
        self.log.append("end")
        self._is_ready = False
        return self._begun.pop(0)

    def copy_blocks(self, sources: list[int], destinations: list[int]) -> None:
        self.log.append("copy")
        super().copy_blocks(sources, destinations)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_random_model(directory, TINY_MODELS["llama"], seed=5)
    return directory


@pytest.fixture(scope="module")
def whole(model: Path) -> TorchModelRunner:
    return load_runner(TorchSpec(model, dtype="float32", num_blocks=64))


def pipelined(whole: TorchModelRunner, stages: SlowStages) -> PipelinedModelRunner:
    return PipelinedModelRunner(whole.model, stages, 0, None, None)  # type: ignore[arg-type]


def engine_of(runner: TorchModelRunner, requests: Iterable[Request] = ()) -> EngineCore:
    """An engine that decides each step before the one before it is executed."""
    config = SchedulerConfig(
        num_blocks=64, block_size=16, max_num_batched_tokens=40, max_num_seqs=16, max_model_len=512
    )
    fields = CacheKeyFields(runner.model.fingerprint, runner.layout.dtype, "test")
    engine = EngineCore(Scheduler(config, fields, FakeClock()), runner, LazyExecutor())
    for request in requests:
        engine.scheduler.add_request(request)
    return engine


def check_idle(engine: EngineCore) -> None:
    engine.scheduler.kv_cache_manager.check_invariant()
    assert not engine.scheduler.kv_cache_manager.blocks_in_use()


def tokens_of(runner: TorchModelRunner, requests: list[Request]) -> dict[str, list[int]]:
    engine = engine_of(runner, requests)
    tokens: defaultdict[str, list[int]] = defaultdict(list)
    while engine.has_work():
        for outputs in engine.step().values():
            for output in outputs:
                assert output.error is None
                tokens[output.attempt.request_id].extend(output.new_token_ids)
    check_idle(engine)
    return tokens


def decoding(num_requests: int, max_tokens: int = 20) -> list[Request]:
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=max_tokens, ignore_eos=True)
    return [Request(f"r{index}", RequestSpec([5 + index, 7, 9], params)) for index in range(num_requests)]


@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_never_run_dry_while_requests_decode(model: Path, whole: TorchModelRunner, num_stages: int) -> None:
    stages = SlowStages(model, num_stages)
    tokens = tokens_of(pipelined(whole, stages), decoding(6))
    assert tokens == tokens_of(whole, decoding(6))
    # A micro-batch begins for each that ends: the first stage does not wait for the end of a step.
    inside = stages.depths[num_stages : -num_stages - 1]
    assert min(inside) == num_stages - 1
    assert max(inside) == num_stages
    assert stages.log.count(f"begin {6 // num_stages}") > 15 * num_stages


def test_a_prompt_goes_through_the_stages_in_parts(model: Path, whole: TorchModelRunner) -> None:
    stages = SlowStages(model, 2)
    prompt = make_prompts(256)["prompt-33"] * 3
    params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=1, prompt_logprobs=1)
    tokens = tokens_of(pipelined(whole, stages), [Request("long", RequestSpec(prompt, params))])
    assert tokens == tokens_of(whole, [Request("long", RequestSpec(prompt, params))])
    # 99 tokens, at most 40 in a step: no part waits for results of another one.
    assert stages.log[:4] == ["begin 20", "begin 20", "begin 20", "begin 20"]


def test_a_single_request_waits_for_its_own_token(model: Path, whole: TorchModelRunner) -> None:
    stages = SlowStages(model, 2)
    assert tokens_of(pipelined(whole, stages), decoding(1)) == tokens_of(whole, decoding(1))
    assert max(stages.depths[6:]) == 1


def test_blocks_are_copied_only_when_all_stages_are_done(model: Path, whole: TorchModelRunner) -> None:
    prompt = [*make_prompts(256)["prompt-33"], 5, 6, 7, 8]

    def requests() -> list[Request]:
        # Three sequences share the last block of the prompt, which is not full.
        several = SamplingParams(temperature=0.9, seed=4, max_tokens=20, n=3, ignore_eos=True)
        return [*decoding(6), Request("several", RequestSpec(prompt, several))]

    stages = SlowStages(model, 2)
    assert tokens_of(pipelined(whole, stages), requests()) == tokens_of(whole, requests())
    at_copies = [depth for event, depth in zip(stages.log, stages.depths, strict=True) if event == "copy"]
    assert at_copies
    assert set(at_copies) == {0}


def test_requests_that_end_while_later_steps_are_begun_leave_nothing(model: Path, whole: TorchModelRunner) -> None:
    """Each ends at another step, while a micro-batch with its next token is already computed."""

    def requests() -> list[Request]:
        made = []
        for index in range(8):
            params = SamplingParams(
                temperature=1.0, seed=index, max_tokens=40, stop_token_ids=frozenset(range(0, 256, 7))
            )
            made.append(Request(f"r{index}", RequestSpec([5 + index, 7, 9], params)))
        return made

    runner = pipelined(whole, SlowStages(model, 2))
    tokens = tokens_of(runner, requests())
    assert tokens == tokens_of(whole, requests())
    assert len({len(one) for one in tokens.values()}) > 3


def test_steps_that_are_executed_out_of_order_are_refused(model: Path, whole: TorchModelRunner) -> None:
    runner = pipelined(whole, SlowStages(model, 2))
    scheduler = engine_of(runner, decoding(4)).scheduler
    first = scheduler.schedule()
    second = scheduler.schedule()
    for decided in (first, second):
        runner.expect(decided)
    runner.execute_model(first)
    with pytest.raises(RuntimeError, match="in the order in which they were expected"):
        runner.execute_model(first)


def fails_once(function: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
    """The function, which has no room at the first call of which `when` is true."""
    to_fail = True

    def called(*arguments: Any) -> Any:
        nonlocal to_fail
        if to_fail and when(*arguments):
            to_fail = False
            raise MemoryError("no room")
        return function(*arguments)

    return called


def errors_of(
    engine: EngineCore, requests: list[Request], late: Sequence[Request] = (), is_due: Callable[[], bool] = lambda: True
) -> dict[str, object]:
    """The errors of all requests, None of those that were served; `late` ones come when they are due."""
    errors: dict[str, object] = {}
    for request in requests:
        engine.scheduler.add_request(request)
    while engine.has_work():
        if late and is_due():
            for request in late:
                engine.scheduler.add_request(request)
            late = ()
        for outputs in engine.step().values():
            errors.update({one.attempt.request_id: one.error for one in outputs if one.outcome is not None})
    return errors


def check_goes_on(runner: TorchModelRunner, stages: SlowStages, engine: EngineCore) -> None:
    assert errors_of(engine, decoding(4)) == {f"r{index}": None for index in range(4)}
    check_idle(engine)
    assert stages.depths[-1] == 0
    assert runner.num_requests <= 4


def test_a_step_that_fails_while_it_samples_fails_alone(
    model: Path, whole: TorchModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = SlowStages(model, 2)
    runner = pipelined(whole, stages)
    monkeypatch.setattr(runner, "_take", fails_once(runner._take, lambda *_: stages.log.count("end") > 6))
    engine = engine_of(runner)
    errors = errors_of(engine, decoding(4))
    assert ["no room" in str(error) for error in errors.values()] == [True] * 4
    check_goes_on(runner, stages, engine)


def test_a_step_that_fails_while_the_next_one_begins_fails_with_it(
    model: Path, whole: TorchModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rows of a step that is begun beside chunks of a long prompt are those of another prompt."""
    stages = SlowStages(model, 2)
    runner = pipelined(whole, stages)

    def begins_ahead(step: StepResults, counts: Iterable[tuple[str, int]]) -> bool:
        return step is not runner._steps[0].results and "late" in dict(counts)

    monkeypatch.setattr(runner, "_rows_of", fails_once(runner._rows_of, begins_ahead))
    engine = engine_of(runner)
    params = decoding(1)[0].sampling_params
    long = Request("long", RequestSpec(make_prompts(256)["prompt-33"] * 6, params))
    late = Request("late", RequestSpec([7, 8, 9], params))  # in the step behind the one that fails, and not in that one
    errors = errors_of(engine, [long], [late], lambda: stages.log.count("end") > 5)
    assert "the step before it failed" in str(errors["late"])
    assert "no room" in str(errors["long"])
    check_goes_on(runner, stages, engine)


def test_the_time_of_a_step_that_begins_ahead_counts_from_the_end_of_the_one_before(
    model: Path, whole: TorchModelRunner
) -> None:
    runner = pipelined(whole, SlowStages(model, 2))
    seconds: list[float] = []
    execute = runner.execute_model

    def timed(decided: SchedulerOutput) -> ModelRunnerOutput:
        output = execute(decided)
        seconds.append(output.compute_seconds)
        return output

    runner.execute_model = timed  # type: ignore[method-assign,assignment]
    began = time.perf_counter()
    tokens_of(runner, decoding(6))
    assert sum(seconds) <= time.perf_counter() - began


def test_closing_ends_a_step_that_is_being_computed(model: Path) -> None:
    for _ in range(5):
        runner = load_runner(
            TorchSpec(model, dtype="float32", num_blocks=64, pipeline_parallel=2), start_stages=FakeStages.start
        )
        begun = threading.Event()
        begin = runner._transformer.begin  # type: ignore[attr-defined]

        def noted(*arguments: Any, begin: Any = begin, begun: threading.Event = begun) -> None:
            begin(*arguments)
            begun.set()

        runner._transformer.begin = noted  # type: ignore[attr-defined]
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(tokens_of, runner, decoding(4, max_tokens=400))
            assert begun.wait(60)
            runner.close()
            assert isinstance(running.exception(timeout=60), RunnerLost)
        runner.expect(SchedulerOutput(0, [], [], {}, 0))
        with pytest.raises(RunnerLost):
            tokens_of(runner, decoding(1))
