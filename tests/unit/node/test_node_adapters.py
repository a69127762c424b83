"""A node with adapters: it acknowledges them, loads them at first use, and fails only the requests of a failed load."""

from __future__ import annotations

import asyncio
import queue
import threading
from pathlib import Path

import pytest

from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.errors import AdapterRefused, ConfigError, DeadlineExceeded, Overloaded
from baton.messages.adapters import AdapterList, AdapterReport, AdapterSource, AdapterStatus
from baton.messages.ids import AttemptKey
from baton.messages.node import Abort, Leg, Outcome, RequestDelta
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.model_formats.adapters import AdapterInfo, open_adapter
from baton.node.adapters.adapter_cache import WAIT_S, AdapterFault
from baton.node.adapters.adapter_threads import MAX_ASKED, MAX_INSPECTING, AdapterDirectories, AdapterThreads
from baton.node.adapters.node_adapters import RETRY_S, NodeAdapters
from baton.node.driver import EngineDriver
from baton.node.router_streams import Port
from baton.runner import SimulatedSpec
from baton.runner.simulated import SimulatedRunner
from tests.doubles.fake_adapter_threads import FakeAdapterThreads
from tests.doubles.fake_clock import FakeClock
from tests.doubles.fake_runner import FakeRunner, expected_tokens
from tests.support.adapter_files import write_simple_adapter
from tests.support.node_rig import KEY, PROMPT, SOURCE, VOCAB, NodeRig, deltas, queued_reports, submit, tokens
from tests.support.virtual_time import run_virtually

A, B, C = ("a" * 64, "b" * 64, "c" * 64)
OTHER = AttemptKey("other", 1, 8)


def sources(*digests: str) -> AdapterList:
    return AdapterList([AdapterSource(digest[0], f"/{digest[0]}", digest) for digest in digests])


async def acknowledged(rig: NodeRig, port: Port, *digests: str) -> None:
    """Let the node acknowledge these adapters."""
    rig.adapters.found |= {f"/{digest[0]}": digest for digest in digests}
    port.receive(sources(*digests))
    reports = await adapter_reports(rig, port)
    assert reports[-1] == AdapterReport([AdapterStatus(digest) for digest in digests])


async def adapter_reports(rig: NodeRig, port: Port) -> list[AdapterReport]:
    """The reports on adapters, once all that were named are checked."""
    for _ in range(10):
        await asyncio.sleep(0)
    assert not [row.name for row in rig.service.report().adapters if row.state == "checking"]
    return [report.adapters for report in await queued_reports(port) if report.adapters is not None]


def end_load(rig: NodeRig, digest: str) -> None:
    """Let the adapter that is being loaded be in the runner's memory."""
    rig.runner.adapters.load(Path("/"), digest)
    rig.adapters.end_load()


def outcomes(of: list[RequestDelta]) -> dict[str, Outcome | None]:
    return {delta.attempt.request_id: delta.outcome for delta in of if delta.outcome is not None}


async def test_a_request_is_computed_with_its_adapter_once_that_is_loaded(rig: NodeRig, port: Port) -> None:
    await acknowledged(rig, port, A, B)
    rig.submit(port, adapter=A)
    rig.complete(port, OTHER)
    (load,) = rig.adapters.loads
    assert (load.digest, load.directory) == (A, "/a")
    got = await deltas(port)
    assert outcomes(got) == {"other": Outcome.LENGTH}, "others go on while it is loaded"
    end_load(rig, A)
    rig.driver.run()
    assert tokens(await deltas(port)) == expected_tokens(PROMPT, 4, seed=3, vocab_size=VOCAB, adapter=A)
    assert [row.state for row in rig.service.report().adapters] == ["loaded", "acknowledged"]
    figures = {(figure.name, *figure.labels.values()): figure.value for figure in rig.service.adapter_figures()}
    assert figures == {
        ("lora_adapters", "checking"): 0,
        ("lora_adapters", "acknowledged"): 1,
        ("lora_adapters", "loaded"): 1,
        ("lora_adapters", "refused"): 0,
        ("lora_loads_total",): 1,
    }


async def test_an_adapter_that_the_node_does_not_acknowledge_is_refused_by_name(rig: NodeRig, port: Port) -> None:
    rig.submit(port, adapter=A)
    (delta,) = await deltas(port)
    assert delta.outcome is Outcome.ADAPTER_UNAVAILABLE
    assert "is not acknowledged" in delta.error
    port.receive(sources(B))
    reports = await adapter_reports(rig, port)
    assert reports[-1] == AdapterReport([AdapterStatus(B, "there is no directory /b")])
    rig.submit(port, OTHER, adapter=B)
    (delta,) = await deltas(port)
    assert (delta.outcome, delta.error) == (Outcome.ADAPTER_UNAVAILABLE, "there is no directory /b")


async def test_a_failed_load_fails_its_requests_alone_and_routers_hear_first_that_the_adapter_is_refused(
    rig: NodeRig, port: Port
) -> None:
    await acknowledged(rig, port, A)
    rig.submit(port, adapter=A)
    rig.begin(port, OTHER)
    await queued_reports(port)
    rig.adapters.end_load(AdapterFault("its files have changed"))
    rig.driver.run()
    reports = await queued_reports(port)
    ends = [place for place, report in enumerate(reports) if any(delta.outcome for delta in report.deltas)]
    told = next(place for place, report in enumerate(reports) if report.adapters is not None)
    assert told < ends[0]
    assert reports[told].adapters == AdapterReport([AdapterStatus(A, "its files have changed")])
    got = outcomes([delta for report in reports for delta in report.deltas])
    assert got == {"req": Outcome.ADAPTER_UNAVAILABLE, "other": Outcome.LENGTH}
    # An operator who has the files inspected again brings it back.
    info = await rig.service.inspect_adapter("", "/a")
    assert info.digest == A
    assert (await queued_reports(port))[-1].adapters == AdapterReport([AdapterStatus(A)])


async def test_a_request_can_be_aborted_while_its_adapter_is_loaded(rig: NodeRig, port: Port) -> None:
    await acknowledged(rig, port, A)
    rig.complete(port, adapter=A)
    port.receive(Abort(KEY, "cancelled"))
    rig.driver.run()
    rig.adapters.end_load()
    rig.driver.run()
    assert not rig.scheduler.has_requests()
    await rig.service.draining.wait_idle()


async def test_a_load_that_takes_too_long_fails_its_requests_and_the_adapter_stays_acknowledged(
    rig: NodeRig, port: Port
) -> None:
    await acknowledged(rig, port, A)
    rig.complete(port, adapter=A)
    rig.manual_clock.advance(WAIT_S)
    rig.driver.run()
    (end,) = await deltas(port)
    assert end.outcome is Outcome.ADAPTER_UNAVAILABLE
    assert "for too long" in end.error
    end_load(rig, A)
    rig.complete(port, OTHER, adapter=A)
    assert outcomes(await deltas(port)) == {"other": Outcome.LENGTH}


async def test_the_least_recently_wanted_adapter_leaves_memory_when_its_requests_have_ended(
    rig: NodeRig, port: Port
) -> None:
    await acknowledged(rig, port, A, B, C)
    for number, digest in enumerate((A, B, C)):
        rig.submit(port, AttemptKey(f"r{number}", 1, 1), adapter=digest)
    rig.driver.run()
    for _ in range(2):
        end_load(rig, rig.adapters.loads[0].digest)
    assert not rig.adapters.loads, "both in memory are in use"
    rig.driver.run()
    assert outcomes(await deltas(port)) == {"r0": Outcome.LENGTH, "r1": Outcome.LENGTH}
    assert [load.digest for load in rig.adapters.loads] == [C]
    assert set(rig.runner.adapters.loaded) == {B}, "A was unloaded to make room"
    end_load(rig, C)
    rig.driver.run()
    assert outcomes(await deltas(port)) == {"r2": Outcome.LENGTH}


async def test_an_adapter_that_has_lost_its_name_leaves_memory_and_running_requests_keep_it(
    rig: NodeRig, port: Port
) -> None:
    await acknowledged(rig, port, A)
    rig.complete(port, adapter=A)
    end_load(rig, A)
    rig.driver.turn()
    port.receive(sources())
    rig.driver.turn()
    assert set(rig.runner.adapters.loaded) == {A}
    rig.driver.run()
    assert tokens(await deltas(port)) == expected_tokens(PROMPT, 4, seed=3, vocab_size=VOCAB, adapter=A)
    assert not rig.runner.adapters.loaded


async def test_a_decode_leg_and_a_bad_digest(rig: NodeRig, port: Port) -> None:
    await acknowledged(rig, port, A)
    port.receive(submit(leg=Leg.DECODE, kv_source=SOURCE, adapter=A))
    rig.driver.run()
    end_load(rig, A)
    rig.driver.run()
    assert not await deltas(port)
    rig.submit(port, OTHER, adapter="../etc")
    (delta,) = await deltas(port)
    assert delta.outcome is Outcome.ERROR
    assert delta.error.startswith("adapter: must be the digest")
    port.receive(Abort(KEY, "done"))
    rig.driver.run()


async def test_another_incarnation_inspects_nothing(rig: NodeRig) -> None:
    with pytest.raises(ConfigError):
        await rig.service.inspect_adapter("decode-0.run7", "/a")


async def test_an_adapter_that_has_moved_is_read_where_it_is_now(rig: NodeRig, port: Port) -> None:
    await acknowledged(rig, port, A)
    rig.adapters.found["/moved"] = A
    port.receive(AdapterList([AdapterSource("a", "/moved", A)]))
    await adapter_reports(rig, port)
    rig.complete(port, adapter=A)
    assert [load.directory for load in rig.adapters.loads] == ["/moved"]


def test_a_load_that_fails_for_a_reason_that_may_pass_takes_an_adapter_away_for_a_while() -> None:
    async def run() -> None:
        rig = NodeRig()
        port = rig.service.open_port("router-0")
        await acknowledged(rig, port, A)
        rig.begin(port, adapter=A)
        rig.adapters.end_load(AdapterFault("no memory", may_pass=True))
        rig.driver.run()
        reports = await queued_reports(port)
        assert outcomes([delta for one in reports for delta in one.deltas]) == {"req": Outcome.ADAPTER_UNAVAILABLE}
        assert [one.adapters for one in reports if one.adapters] == [AdapterReport([AdapterStatus(A, "no memory")])]
        await asyncio.sleep(RETRY_S / 2)
        assert not await queued_reports(port)
        await asyncio.sleep(RETRY_S)
        assert [one.adapters for one in await queued_reports(port)] == [AdapterReport([AdapterStatus(A)])]
        rig.service.close()

    run_virtually(run())


def test_a_check_that_fails_for_a_reason_that_may_pass_is_made_again_while_the_adapter_is_wanted() -> None:
    async def run() -> None:
        threads = _FailingThreads()
        reports: list[AdapterReport] = []
        adapters = NodeAdapters(threads, lambda port, report: reports.append(report), lambda digests: None)
        adapters.set_list(1, sources(A).adapters)
        await asyncio.sleep(RETRY_S * 1.5)
        assert threads.checked == ["/a", "/a"]
        assert reports[-1] == AdapterReport([AdapterStatus(A, "too many open files")])
        adapters.set_list(1, ())
        await asyncio.sleep(RETRY_S * 3)
        assert threads.checked == ["/a", "/a"]
        adapters.close()

    run_virtually(run())


class _FailingThreads(FakeAdapterThreads):
    async def find_fault(self, directory: str, digest: str) -> AdapterFault | None:
        self.checked.append(directory)
        return AdapterFault("too many open files", may_pass=True)


class _HangingThreads(FakeAdapterThreads):
    def __init__(self) -> None:
        super().__init__()
        self.may_end = asyncio.Event()

    async def find_fault(self, directory: str, digest: str) -> AdapterFault | None:
        self.checked.append(directory)
        await self.may_end.wait()
        return None


async def test_however_many_lists_come_few_checks_run_and_only_what_is_wanted_is_checked() -> None:
    threads = _HangingThreads()
    adapters = NodeAdapters(threads, lambda port, report: None, lambda digests: None)
    before = len(asyncio.all_tasks())
    for number in range(2000):
        adapters.set_list(1, [AdapterSource(f"n{number}", f"/{number}", f"{number:064x}")])
        if number < 5:
            await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) - before == MAX_INSPECTING
    threads.may_end.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert threads.checked == ["/0", "/1", "/1999"]
    assert [row.state for row in adapters.rows()] == ["acknowledged"]


def test_all_adapters_leave_memory_when_the_engine_ends_once_none_is_read_any_more() -> None:
    runner, threads = FakeRunner(33, 4), _LastLoad()
    limits = SchedulerConfig(33, block_size=4)
    scheduler = Scheduler(limits, CacheKeyFields.of(runner.model, runner.layout), FakeClock())
    begun = threading.Event()
    driver = EngineDriver(
        scheduler, runner, lambda news: begun.set(), lambda error: None, adapters=threads, max_cpu_loras=2
    )
    threads.runner = runner
    driver.start()
    driver.submit(Request("r", RequestSpec(PROMPT, SamplingParams(max_tokens=2), adapter=A)), "/a")
    assert begun.wait(30)
    driver.stop()
    assert threads.is_closed, "what is read last is waited for"
    assert [load.digest for load in threads.loads] == [A]
    assert not runner.adapters.loaded


class _LastLoad(FakeAdapterThreads):
    """Ends its load when the engine ends."""

    runner: FakeRunner

    def close(self) -> None:
        super().close()
        for load in self.loads:
            self.runner.adapters.load(Path(load.directory), load.digest)


async def test_threads_inspect_load_and_say_why_not(tmp_path: Path) -> None:
    runner = SimulatedRunner(SimulatedSpec())
    one = write_simple_adapter(tmp_path / "one")
    digest = open_adapter(one).digest()
    threads = AdapterThreads(runner, AdapterDirectories([tmp_path], runner.adapters.check))
    assert (await threads.inspect(str(one))).digest == digest
    assert await threads.find_fault(str(one), digest) is None
    other = await threads.find_fault(str(one), B)
    assert other is not None
    assert digest in other.reason
    with pytest.raises(AdapterRefused, match="in no directory"):
        await threads.inspect("/")
    results: asyncio.Queue[AdapterFault | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def done(fault: AdapterFault | None) -> None:
        loop.call_soon_threadsafe(results.put_nowait, fault)

    async def loaded(digest: str) -> AdapterFault:
        threads.load(digest, str(one), done)
        return await results.get() or AdapterFault("")

    assert await loaded(digest) == AdapterFault("")
    changed = await loaded(B)
    assert "its files have changed" in changed.reason
    assert not changed.may_pass
    (one / "adapter_config.json").unlink()
    assert "is not there" in (await loaded(digest)).reason
    await threads.aclose()
    closed = await loaded(digest)
    assert "shutting down" in closed.reason
    assert closed.may_pass


@pytest.mark.parametrize("cause", [OSError(5, "input/output error"), MemoryError(), ValueError("unsound"), None])
async def test_only_what_is_wrong_with_the_files_counts_as_final(tmp_path: Path, cause: Exception | None) -> None:
    def fails(_directory: Path) -> AdapterInfo:
        raise AdapterRefused("it can't be used") from cause

    one = write_simple_adapter(tmp_path / "one")
    threads = AdapterThreads(SimulatedRunner(SimulatedSpec()), AdapterDirectories([tmp_path], fails))
    may_pass = isinstance(cause, OSError | MemoryError)
    assert await threads.find_fault(str(one), A) == AdapterFault("it can't be used", may_pass)
    await threads.aclose()


async def test_a_fault_of_no_known_kind_may_pass(tmp_path: Path) -> None:
    def fails(_directory: Path) -> AdapterInfo:
        raise RuntimeError("a bug")

    one = write_simple_adapter(tmp_path / "one")
    threads = AdapterThreads(SimulatedRunner(SimulatedSpec()), AdapterDirectories([tmp_path], fails))
    fault = await threads.find_fault(str(one), A)
    assert fault is not None
    assert fault.may_pass
    await threads.aclose()


async def test_a_load_opens_no_file_outside_of_the_allowed_directories(tmp_path: Path) -> None:
    one, secret = write_simple_adapter(tmp_path / "allowed" / "one"), write_simple_adapter(tmp_path / "secret")
    digest = open_adapter(one).digest()
    runner = SimulatedRunner(SimulatedSpec())
    load = runner.adapters.load

    def load_late(directory: Path, digest: str) -> None:
        (one / "adapter_model.safetensors").unlink()
        (one / "adapter_model.safetensors").symlink_to(secret / "adapter_model.safetensors")
        load(directory, digest)

    runner.adapters.load = load_late  # type: ignore[method-assign]
    threads = AdapterThreads(runner, AdapterDirectories([tmp_path / "allowed"], runner.adapters.check))
    faults: queue.SimpleQueue[AdapterFault | None] = queue.SimpleQueue()
    threads.load(digest, str(one), faults.put)
    fault = await asyncio.to_thread(faults.get, timeout=30)
    assert fault is not None
    assert "leads out of the directories" in fault.reason
    await threads.aclose()


class _Hanging:
    """Reads that hang until they may end."""

    def __init__(self, directory: Path) -> None:
        self.may_end = threading.Event()
        self.begun: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self.one, self.two, self.three = (str(write_simple_adapter(directory / name)) for name in ("1", "2", "3"))
        runner = SimulatedRunner(SimulatedSpec())
        runner.adapters.load = lambda directory, digest: self._read(directory)  # type: ignore[method-assign,assignment]
        directories = AdapterDirectories([directory], self._read)
        self.threads = AdapterThreads(runner, directories, inspect_s=0.01)

    def _read(self, directory: Path) -> AdapterInfo:
        self.begun.put(directory)
        assert self.may_end.wait(60)
        raise AdapterRefused("late")


async def test_a_directory_that_does_not_answer_is_given_up_and_keeps_its_turn(tmp_path: Path) -> None:
    hanging = _Hanging(tmp_path)
    for directory in (hanging.one, hanging.two, hanging.three):
        with pytest.raises(DeadlineExceeded, match="could not be read within"):
            await hanging.threads.inspect(directory)
    assert {hanging.begun.get(timeout=30) for _ in range(2)} == {Path(hanging.one), Path(hanging.two)}
    assert hanging.begun.empty(), "the third one has no turn"
    checking = asyncio.create_task(hanging.threads.find_fault(hanging.three, A))
    hanging.may_end.set()
    assert await checking == AdapterFault("late")
    await hanging.threads.aclose()


async def test_operators_can_ask_for_so_many_inspections_at_a_time(tmp_path: Path) -> None:
    hanging = _Hanging(tmp_path)
    asked = [asyncio.create_task(hanging.threads.inspect(hanging.one)) for _ in range(MAX_ASKED + 5)]
    await asyncio.sleep(0)
    hanging.may_end.set()
    ends = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(end, Overloaded) for end in ends) == 5
    await hanging.threads.aclose()


async def test_loads_that_hang_hold_up_no_others(tmp_path: Path) -> None:
    hanging = _Hanging(tmp_path)
    ended: list[AdapterFault | None] = []
    for directory in (hanging.one, hanging.two, hanging.three):
        hanging.threads.load(A, directory, ended.append)
    for _ in range(3):
        hanging.begun.get(timeout=30)
    assert not ended
    hanging.may_end.set()
    await hanging.threads.aclose()
    assert ended == [AdapterFault("late")] * 3


async def test_what_hangs_is_left_behind_and_the_process_can_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.node.adapters.adapter_threads._CLOSE_S", 0.01)
    hanging = _Hanging(tmp_path)
    hanging.threads.load(A, hanging.one, lambda fault: None)
    await hanging.threads.aclose()
    hanging.threads.close()
    left = [thread for thread in threading.enumerate() if thread.name == "baton-adapter-load"]
    assert [thread.daemon for thread in left] == [True]
    # asyncio joins the threads of its own executor when it ends, without a limit: none of them may wait for the read.
    executor = asyncio.get_running_loop()._default_executor  # type: ignore[attr-defined]
    assert executor is None
    hanging.may_end.set()
    left[0].join()
