"""A node with adapters: it acknowledges them, loads them at first use, and fails only the requests of a failed load."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from baton.errors import AdapterRefused, ConfigError
from baton.messages.adapters import AdapterList, AdapterReport, AdapterSource, AdapterStatus
from baton.messages.ids import AttemptKey
from baton.messages.node import Abort, Leg, Outcome, RequestDelta
from baton.model_formats.adapters import open_adapter
from baton.node.adapters.adapter_files import AdapterDirectories
from baton.node.adapters.adapter_threads import AdapterThreads
from baton.node.port import Port
from baton.runner import SimulatedSpec
from baton.runner.simulated import SimulatedRunner
from baton.testing.fake_runner import expected_tokens
from tests.support.adapter_files import write_simple_adapter
from tests.support.node_rig import KEY, PROMPT, SOURCE, VOCAB, NodeRig, deltas, queued_reports, submit, tokens

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


def outcomes(of: list[RequestDelta]) -> dict[str, Outcome | None]:
    return {delta.attempt.request_id: delta.outcome for delta in of if delta.outcome is not None}


async def test_a_request_is_computed_with_its_adapter_once_that_is_loaded() -> None:
    rig = NodeRig()
    port = rig.service.open_port("router-0")
    await acknowledged(rig, port, A, B)
    rig.submit(port, adapter=A)
    rig.submit(port, OTHER)
    rig.driver.run()
    (load,) = rig.adapters.loads
    assert (load.digest, load.directory) == (A, "/a")
    got = await deltas(port)
    assert outcomes(got) == {"other": Outcome.LENGTH}, "others go on while it is loaded"
    rig.runner.load_adapter(Path("/a"), A)
    rig.adapters.end_load()
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


async def test_an_adapter_that_the_node_does_not_acknowledge_is_refused_by_name() -> None:
    rig = NodeRig()
    port = rig.service.open_port("router-0")
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


async def test_a_failed_load_fails_its_requests_alone_and_routers_hear_first_that_the_adapter_is_refused() -> None:
    rig = NodeRig()
    port = rig.service.open_port("router-0")
    await acknowledged(rig, port, A)
    rig.submit(port, adapter=A)
    rig.submit(port, OTHER)
    rig.driver.turn()
    await queued_reports(port)
    rig.adapters.end_load("its files have changed")
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


async def test_a_request_can_be_aborted_while_its_adapter_is_loaded() -> None:
    rig = NodeRig()
    port = rig.service.open_port("router-0")
    await acknowledged(rig, port, A)
    rig.submit(port, adapter=A)
    rig.driver.run()
    port.receive(Abort(KEY, "cancelled"))
    rig.driver.run()
    rig.adapters.end_load()
    rig.driver.run()
    assert not rig.scheduler.has_requests()
    await rig.service.wait_idle()


async def test_a_load_that_takes_too_long_fails_its_requests_and_the_adapter_stays_acknowledged() -> None:
    rig = NodeRig()
    port = rig.service.open_port("router-0")
    await acknowledged(rig, port, A)
    rig.submit(port, adapter=A)
    rig.driver.run()
    rig.adapters.loads[0].too_long()
    rig.driver.run()
    (end,) = await deltas(port)
    assert end.outcome is Outcome.ADAPTER_UNAVAILABLE
    assert "for too long" in end.error
    rig.runner.load_adapter(Path("/a"), A)
    rig.adapters.end_load()
    rig.submit(port, OTHER, adapter=A)
    rig.driver.run()
    assert outcomes(await deltas(port)) == {"other": Outcome.LENGTH}


async def test_the_least_recently_wanted_adapter_leaves_memory_when_its_requests_have_ended() -> None:
    rig = NodeRig()
    port = rig.service.open_port("router-0")
    await acknowledged(rig, port, A, B, C)
    for number, digest in enumerate((A, B, C)):
        rig.submit(port, AttemptKey(f"r{number}", 1, 1), adapter=digest)
    rig.driver.run()
    for _ in range(2):
        rig.runner.load_adapter(Path("/"), rig.adapters.loads[0].digest)
        rig.adapters.end_load()
    assert not rig.adapters.loads, "both in memory are in use"
    rig.driver.run()
    assert outcomes(await deltas(port)) == {"r0": Outcome.LENGTH, "r1": Outcome.LENGTH}
    assert [load.digest for load in rig.adapters.loads] == [C]
    assert set(rig.runner.adapters) == {B}, "A was unloaded to make room"
    rig.runner.load_adapter(Path("/c"), C)
    rig.adapters.end_load()
    rig.driver.run()
    assert outcomes(await deltas(port)) == {"r2": Outcome.LENGTH}


async def test_an_adapter_that_has_lost_its_name_leaves_memory_and_running_requests_keep_it() -> None:
    rig = NodeRig()
    port = rig.service.open_port("router-0")
    await acknowledged(rig, port, A)
    rig.submit(port, adapter=A)
    rig.driver.run()
    rig.runner.load_adapter(Path("/a"), A)
    rig.adapters.end_load()
    rig.driver.turn()
    port.receive(sources())
    rig.driver.turn()
    assert set(rig.runner.adapters) == {A}
    rig.driver.run()
    assert tokens(await deltas(port)) == expected_tokens(PROMPT, 4, seed=3, vocab_size=VOCAB, adapter=A)
    assert not rig.runner.adapters


async def test_a_decode_leg_and_a_bad_digest() -> None:
    rig = NodeRig()
    port = rig.service.open_port("router-0")
    await acknowledged(rig, port, A)
    port.receive(submit(leg=Leg.DECODE, kv_source=SOURCE, adapter=A))
    rig.driver.run()
    rig.runner.load_adapter(Path("/a"), A)
    rig.adapters.end_load()
    rig.driver.run()
    assert not await deltas(port)
    rig.submit(port, OTHER, adapter="../etc")
    (delta,) = await deltas(port)
    assert delta.outcome is Outcome.ERROR
    assert delta.error.startswith("adapter: must be the digest")
    port.receive(Abort(KEY, "done"))
    rig.driver.run()


async def test_another_incarnation_inspects_nothing() -> None:
    rig = NodeRig()
    with pytest.raises(ConfigError):
        await rig.service.inspect_adapter("decode-0.run7", "/a")


async def test_threads_inspect_load_and_say_why_not(tmp_path: Path) -> None:
    runner = SimulatedRunner(SimulatedSpec())
    one = write_simple_adapter(tmp_path / "one")
    digest = open_adapter(one).digest()
    threads = AdapterThreads(runner, AdapterDirectories([tmp_path], runner.check_adapter))
    assert (await threads.inspect(str(one))).digest == digest
    assert await threads.why_not(str(one), digest) == ""
    assert digest in await threads.why_not(str(one), B)
    with pytest.raises(AdapterRefused, match="in no directory"):
        await threads.inspect("/")
    results: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def done(refusal: str) -> None:
        loop.call_soon_threadsafe(results.put_nowait, refusal)

    threads.load(digest, str(one), done, lambda: None)
    assert await results.get() == ""
    threads.load(B, str(one), done, lambda: None)
    assert "its files have changed" in await results.get()
    (one / "adapter_config.json").unlink()
    threads.load(digest, str(one), done, lambda: None)
    assert "is not there" in await results.get()
    await threads.close()
    threads.load(digest, str(one), done, lambda: None)
    assert "shutting down" in await results.get()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("baton-adapter")]


async def test_a_directory_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    answers = threading.Event()

    def hangs(_directory: Path) -> None:
        answers.wait()
        raise AdapterRefused("late")

    one = write_simple_adapter(tmp_path / "one")
    runner = SimulatedRunner(SimulatedSpec())
    runner.load_adapter = lambda directory, digest: hangs(directory)  # type: ignore[method-assign]
    threads = AdapterThreads(runner, AdapterDirectories([tmp_path], hangs), load_s=0.01)  # type: ignore[arg-type]
    assert "could not be read within" in await threads.why_not(str(one), A)
    late = threading.Event()
    ended: list[str] = []
    threads.load(A, str(one), ended.append, late.set)
    assert await asyncio.to_thread(late.wait, 30)
    assert not ended
    answers.set()
    await threads.close()
    assert ended == ["late"]
