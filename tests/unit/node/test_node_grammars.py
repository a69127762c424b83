"""JSON schemas are compiled beside the engine: a request that waits for its schema or fails with it delays no other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import baton
from baton.config import NodeConfig
from baton.engine.batch import EngineCoreOutput
from baton.engine.constraints import TokenMatcher
from baton.engine.request import Request
from baton.engine.runner import ModelInfo
from baton.errors import BatonError, InvalidRequest
from baton.messages.node import Leg, Outcome
from baton.messages.sampling import SamplingParams
from baton.node.attempts.grammars import GrammarCompiler, load_compiler
from baton.node.driver import EngineDriver, StepNews
from baton.text.bounded_workers import BoundedWorkers
from baton.text.constraint_checker import ConstraintChecker
from tests.doubles.fake_grammar import FakeMatcher
from tests.support.engine_rig import SOURCE, EngineRig, prompt_of
from tests.support.requests import request_of
from tests.support.schema_bombs import schema_bomb

LONG_S = 30.0
ANY = range(1000)


class Compiler:
    """Compiles matchers once its gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.made: list[FakeMatcher] = []

    def __call__(self, json_schema: str, kind: str = "json_schema") -> TokenMatcher:
        self.begun.put(json_schema)
        assert self.gate.wait(LONG_S)
        if json_schema == "bad":
            raise InvalidRequest("json_schema", "is bad")
        if json_schema == "worse":
            raise RuntimeError("a bug")
        self.made.append(FakeMatcher([ANY] * 100, ANY))
        return self.made[-1]


class Rig:
    """An engine's driver with a compiler."""

    def __init__(self) -> None:
        self.engine = EngineRig()
        self.compiler = Compiler()
        self.outputs: queue.SimpleQueue[EngineCoreOutput] = queue.SimpleQueue()
        self.ends: dict[str, EngineCoreOutput] = {}
        self.crashes: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        grammars = GrammarCompiler(self.compiler)
        self.driver = EngineDriver(
            self.engine.scheduler, self.engine.runner, self.publish, self.crashes.put, grammars=grammars
        )

    def publish(self, news: StepNews) -> None:
        for batch in news.outputs.values():
            for output in batch:
                self.outputs.put(output)

    def end(self, request_id: str) -> EngineCoreOutput:
        """The last output of a request."""
        while request_id not in self.ends:
            output = self.outputs.get(timeout=LONG_S)
            if output.outcome is not None:
                self.ends[output.attempt.request_id] = output
        return self.ends[request_id]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    rig.driver.start()
    yield rig
    rig.compiler.gate.set()
    rig.driver.stop()
    assert rig.crashes.empty()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("baton")]


def request(request_id: str, json_schema: str = "", **fields: object) -> Request:
    n = int(str(fields.pop("n", 1)))
    params = SamplingParams(max_tokens=3, json_schema=json_schema, n=n)
    return request_of(request_id, prompt_of(6), params, **fields)


def test_others_run_while_a_grammar_is_compiled(rig: Rig) -> None:
    rig.driver.submit(request("g", "schema"))
    assert rig.compiler.begun.get(timeout=LONG_S) == "schema"
    rig.driver.submit(request("other"))
    assert rig.end("other").outcome is Outcome.LENGTH
    rig.compiler.gate.set()
    assert rig.end("g").outcome is Outcome.LENGTH


@pytest.mark.parametrize("schema", ["bad", "worse"])
def test_a_schema_that_can_not_be_compiled_fails_its_request_alone(rig: Rig, schema: str) -> None:
    rig.compiler.gate.set()
    rig.driver.submit(request("bad", schema))
    rig.driver.submit(request("good", "schema"))
    end = rig.end("bad")
    assert end.outcome is {"bad": Outcome.INVALID, "worse": Outcome.ERROR}[schema]
    assert str(end.error).startswith("json_schema: ")
    assert rig.end("good").outcome is Outcome.LENGTH


def test_a_request_that_is_aborted_meanwhile_ends_at_once(rig: Rig) -> None:
    rig.driver.submit(request("g", "schema"))
    rig.compiler.begun.get(timeout=LONG_S)
    rig.driver.abort(["g"])
    assert rig.end("g").outcome is Outcome.ABORTED
    rig.compiler.gate.set()
    rig.driver.submit(request("next", "schema"))
    assert rig.end("next").outcome is Outcome.LENGTH


def test_a_schema_is_compiled_only_after_the_checker_has_checked_it() -> None:
    made: list[str] = []

    def matcher(json_schema: str, kind: str) -> TokenMatcher:
        made.append(json_schema)
        return FakeMatcher([ANY], ANY)

    told: queue.SimpleQueue[Sequence[TokenMatcher] | BatonError] = queue.SimpleQueue()
    workers = BoundedWorkers()
    compiler = GrammarCompiler(matcher, checker=ConstraintChecker(workers))
    compiler.compile(request("bad", schema_bomb()), told.put, told.put)
    refusal = told.get(timeout=LONG_S)
    assert isinstance(refusal, InvalidRequest)
    assert refusal.field == "json_schema"
    assert not made
    compiler.compile(request("good", "{}", n=2), told.put, told.put)
    assert not isinstance(told.get(timeout=LONG_S), BatonError)
    assert made == ["{}", "{}"]
    compiler.close()
    assert not workers.pids


def test_one_tenants_schemas_keep_no_other_tenant_waiting() -> None:
    gated, told = Compiler(), queue.SimpleQueue[Sequence[TokenMatcher] | BatonError]()

    def matcher(json_schema: str, kind: str) -> TokenMatcher:
        return FakeMatcher([ANY], ANY) if json_schema == "quick" else gated(json_schema)

    compiler = GrammarCompiler(matcher)
    for number in range(4):
        compiler.compile(request(f"slow/{number}#1", "schema"), print, print)
    assert gated.begun.get(timeout=LONG_S) == "schema"
    compiler.compile(request("other/1#1", "quick"), told.put, told.put)
    assert not isinstance(told.get(timeout=LONG_S), BatonError)
    gated.gate.set()
    compiler.close()


@pytest.mark.parametrize(("leg", "num_matchers"), [(Leg.WHOLE, 3), (Leg.PREFILL, 1), (Leg.DECODE, 3)])
def test_each_sequence_has_a_matcher_of_its_own(rig: Rig, leg: Leg, num_matchers: int) -> None:
    rig.compiler.gate.set()
    told: queue.SimpleQueue[Sequence[TokenMatcher]] = queue.SimpleQueue()
    source = SOURCE if leg is Leg.DECODE else None
    compiler = GrammarCompiler(rig.compiler)
    compiler.compile(request("g", "schema", n=3, leg=leg, kv_source=source), told.put, print)
    matchers = told.get(timeout=LONG_S)
    compiler.close()
    assert list(matchers) == rig.compiler.made
    assert len({id(matcher) for matcher in matchers}) == num_matchers


def test_matchers_begin_after_the_output_of_an_earlier_attempt(rig: Rig) -> None:
    rig.compiler.gate.set()
    told: queue.SimpleQueue[Sequence[TokenMatcher] | BatonError] = queue.SimpleQueue()
    resumed = request("g", "schema")
    resumed.output_token_ids = [5, 6, 7]
    compiler = GrammarCompiler(rig.compiler)
    compiler.compile(resumed, told.put, told.put)
    compiled = told.get(timeout=LONG_S)
    assert not isinstance(compiled, BatonError)
    (matcher,) = compiled
    assert isinstance(matcher, FakeMatcher)
    assert matcher.tokens == [5, 6, 7]
    resumed.output_token_ids = [5000]
    compiler.compile(resumed, told.put, told.put)
    assert str(told.get(timeout=LONG_S)).startswith("json_schema: token 5000")
    compiler.close()


def test_nothing_is_compiled_once_the_driver_has_stopped(rig: Rig) -> None:
    for number in range(3):
        rig.driver.submit(request(f"g{number}", f"schema {number}"))
    assert rig.compiler.begun.get(timeout=LONG_S) == "schema 0"
    rig.compiler.gate.set()
    rig.driver.stop()
    rig.driver.submit(request("late", "late"))
    assert len(rig.compiler.made) <= 3


def test_without_a_compiler_a_schema_is_an_error() -> None:
    rig = Rig()
    driver = EngineDriver(rig.engine.scheduler, rig.engine.runner, rig.publish, rig.crashes.put)
    driver.start()
    driver.submit(request("g", "schema"))
    end = rig.end("g")
    assert (end.outcome, str(end.error)) == (Outcome.INVALID, "json_schema: this node's model has no text")
    driver.stop()


def config(model: Path, **fields: object) -> NodeConfig:
    values = {"role": "decode", "node_id": "d", "registry": "memory://", "cluster": "c", "model": model, **fields}
    return NodeConfig.model_validate(values)


def model_info(eos: frozenset[int]) -> ModelInfo:
    return ModelInfo("demo", "", "", "float32", "", 4096, 2048, eos, bit_exact=True)


def compiled(compiler: GrammarCompiler) -> Sequence[TokenMatcher] | str:
    told: queue.SimpleQueue[Sequence[TokenMatcher] | BatonError] = queue.SimpleQueue()
    compiler.compile(request("g", "{}"), told.put, told.put)
    result = told.get(timeout=LONG_S)
    compiler.close()
    return str(result) if isinstance(result, BatonError) else result


def test_a_node_compiles_for_its_own_model_or_says_why_it_can_not(tmp_path: Path) -> None:
    demo = Path(baton.__file__).parent / "demo_model"
    compiler = load_compiler(config(demo), model_info(frozenset({1})))
    assert not isinstance(compiled(compiler), str)
    for thread in [one for one in threading.enumerate() if one.name.startswith("baton")]:
        thread.join(LONG_S)
        assert not thread.is_alive(), "a compiler that is closed leaves no thread"
    del compiler  # before, a thread may not have ended for want of its owner
    assert "no end-of-sequence token" in str(compiled(load_compiler(config(demo), model_info(frozenset()))))
    assert "tokenizer.json" in str(compiled(load_compiler(config(tmp_path), model_info(frozenset({1})))))
    simulated = load_compiler(config(demo, runner="simulated"), model_info(frozenset({1})))
    assert compiled(simulated) == "json_schema: this node's model has no text"
