"""Each background task and callback of a router raises once: the process ends or the work continues, never silently.

docs/architecture/operations.md lists them. Those of a node are in tests/unit/node/test_node_serve.py and
tests/fault/test_handoff_faults.py.
"""

from __future__ import annotations

import ast
import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.background import BackgroundWatch, current_watch
from baton.config import RouterConfig
from baton.errors import BackgroundFault
from baton.registry.records import NodeRecord
from baton.registry.registry import RedisLease, Registry
from router.app import run_router
from router.http.client import Client
from router.http.server import _Server
from router.losses import NodeLosses
from router.operations.live_totals import LiveTotals
from router.operations.steering import Steering
from router.process import RouterAddresses, RouterProcess
from router.timers import LoopTimers
from router.waiting_room import WaitingRoom
from tests.doubles.fake_registry import FakeRegistry, FakeRegistryStore
from tests.support.redis_server import RedisProcess
from tests.support.router_parts import decode, record_of
from tests.support.router_rig import router_rig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ended() -> Iterator[asyncio.Queue[BackgroundFault]]:
    """The faults that would have ended the process."""
    faults: asyncio.Queue[BackgroundFault] = asyncio.Queue()
    before = current_watch.set(BackgroundWatch(faults.put_nowait))
    yield faults
    current_watch.reset(before)


class Broken:
    """A wrapper that raises in its first call, and calls the real function from then on."""

    def __init__(self, work: Any = None) -> None:
        self.work = work
        self.calls = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise ValueError("out of luck")
        return self.work(*arguments, **named)


async def raising(*_arguments: object) -> None:
    raise ValueError("out of luck")


@asynccontextmanager
async def running_router(directory: Path) -> AsyncIterator[tuple[asyncio.Task[None], RouterAddresses]]:
    (directory / "config.json").write_text(json.dumps({"vocab_size": 300, "max_position_embeddings": 64}))
    settings = {"grpc_port": 0, "http_port": 0, "runner": "simulated", "drain_s": 0.0}
    config = RouterConfig.model_validate(
        {"registry": "unused", "cluster": "test", "router_id": "router-1", "model": directory, **settings}
    )
    membership, stop = FakeRegistry(FakeRegistryStore(), "test"), asyncio.Event()
    ready: asyncio.Future[RouterAddresses] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(run_router(config, ready.set_result, stop, membership))
    await asyncio.wait((ready, task), return_when=asyncio.FIRST_COMPLETED)
    try:
        yield task, ready.result() if ready.done() else RouterAddresses("", "", "")
    finally:
        stop.set()
        await asyncio.gather(task, return_exceptions=True)
        await membership.close()


@pytest.mark.parametrize(
    ("owner", "work", "kind"),
    [
        (RouterProcess, "_watch", "router-watch"),
        (RouterProcess, "_publish_health", "router-health"),
        (Steering, "watch", "router-steering"),
        (Steering, "check_periodically", "router-look"),
        (_Server, "main_loop", "http-server"),
    ],
)
async def test_a_fault_in_an_essential_task_ends_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, work: str, kind: str
) -> None:
    monkeypatch.setattr(owner, work, raising)
    async with running_router(tmp_path) as (task, _):
        with pytest.raises(BackgroundFault, match=rf"{kind} failed: ValueError\('out of luck'\)"):
            await task


async def test_a_fault_in_the_totals_for_the_live_page_starts_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tries, started_again = 0, asyncio.Event()

    async def fail_once(_: LiveTotals) -> None:
        nonlocal num_tries
        num_tries += 1
        if num_tries == 1:
            raise ValueError("out of luck")
        started_again.set()

    monkeypatch.setattr(LiveTotals, "sample", fail_once)
    async with running_router(tmp_path) as (task, _):
        await started_again.wait()
        assert not task.done()


async def test_a_timer_that_raises_ends_the_process(ended: asyncio.Queue[BackgroundFault]) -> None:
    timers, fired = LoopTimers(), asyncio.Event()
    timers.call_at(timers.monotonic(), Broken())
    timers.call_at(timers.monotonic(), fired.set)
    await fired.wait()
    assert str(ended.get_nowait()) == "background task timer failed: ValueError('out of luck')"


@pytest.mark.parametrize(
    ("owner", "work", "kind"),
    [(NodeLosses, "resolve_flights", "lost-nodes"), (WaitingRoom, "serve", "request-queue")],
)
async def test_a_turn_of_the_loop_that_raises_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, ended: asyncio.Queue[BackgroundFault], owner: type, work: str, kind: str
) -> None:
    """Requests that are not informed would wait for ever."""
    async with router_rig(decode("d1")) as rig:
        reader = rig.ask("hello", request_id="r")
        await rig.next_submit("d1")
        if kind == "lost-nodes":
            monkeypatch.setattr(owner, work, Broken(lambda *_: None))
            rig.nodes["d1"].die()
        else:
            # More requests than one turn serves: the rest is left to the next turn.
            monkeypatch.setattr(owner, work, lambda *_: True)
            rig.dispatcher.requests._serve_queue()
            monkeypatch.setattr(owner, work, Broken(lambda *_: False))
        assert str(await ended.get()) == f"background task {kind} failed: ValueError('out of luck')"
        reader.task.cancel()
        await asyncio.gather(reader.task, return_exceptions=True)


async def test_a_fault_in_watching_a_client_ends_its_exchange(ended: asyncio.Queue[BackgroundFault]) -> None:
    async def send(_message: Any) -> None:
        raise AssertionError

    async def exchange() -> str:
        async with Client(raising, send, keep_alive_s=60.0) as client:  # type: ignore[arg-type]
            await asyncio.Event().wait()
        return f"gone: {client.is_gone}"

    assert await exchange() == "gone: True"
    assert (current_watch.get().faults, ended.empty()) == ({"http-client": 1}, True)


@pytest.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    server = RedisProcess(tmp_path)
    await server.start()
    made = Registry.connect(server.url, "c")
    yield made
    await made.close()
    await server.stop()


async def test_the_registry_is_followed_again(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, ended: asyncio.Queue[BackgroundFault]
) -> None:
    monkeypatch.setattr(registry, "_publish_to_watchers", broken := Broken(registry._publish_to_watchers))
    lease = await registry.lease(record_of(decode("d1")))
    async for snapshot in registry.watch():
        if "d1" in snapshot:
            break
    await lease.close()
    assert broken.calls > 1
    assert (current_watch.get().faults, ended.empty()) == ({"registry-follower": 1}, True)


async def test_a_lease_is_renewed_again(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, ended: asyncio.Queue[BackgroundFault]
) -> None:
    renewed = asyncio.Event()
    publish = registry.publish

    async def then_tell(record: NodeRecord) -> None:
        await publish(record)
        renewed.set()

    lease = await registry.lease(replace(record_of(decode("d1")), lease_s=0.3))
    assert isinstance(lease, RedisLease)
    monkeypatch.setattr(registry, "publish", Broken(then_tell))
    await renewed.wait()
    await lease.close()
    assert (current_watch.get().faults, ended.empty()) == ({"registry-lease": 1}, True)


PACKAGES = (
    *("router", "prefill_node", "decode_node", "kv_transfer"),
    *("baton/node", "baton/registry", "baton/wire", "baton/observe", "baton/text", "baton/security"),
)
STARTERS = {"create_task", "ensure_future", "Thread", "ThreadPoolExecutor", "DaemonWorker", "run_coroutine_threadsafe"}
GUARDED_OTHERWISE = {
    "router/app.py": (1, "the question to another router awaits it"),
    "router/process.py": (4, "the run itself awaits them"),
    "router/http/audio/endpoint.py": (1, "the call awaits it; once its client is gone, its error concerns nobody"),
    "router/http/audio/transcription.py": (1, "each part hands its error to the call, which raises it"),
    "router/http/answers.py": (1, "each prompt's stream hands its error to the answer, which raises it"),
    "router/http/server.py": (1, "the start awaits it"),
    "router/node_links.py": (1, "the link's task awaits the attachment"),
    "router/operations/adapters.py": (2, "the follower of adapters awaits them"),
    "router/operations/steering.py": (2, "the drain that waits awaits them"),
    "kv_transfer/link/link.py": (4, "the link's run awaits them"),
    "kv_transfer/mover/daemon_worker.py": (1, "a fault of what is submitted is in its future"),
    "kv_transfer/mover/digest_queue.py": (1, "the thread reports its fault; digests that fail fail their read"),
    "kv_transfer/mover/mover.py": (1, "the thread reports its fault"),
    "kv_transfer/mover/parts_mover.py": (2, "the watch and the stop of all parts await them"),
    "kv_transfer/remote/mover_server.py": (1, "the thread reports the fault to the node"),
    "kv_transfer/remote/remote_mover.py": (1, "the thread reports its fault"),
    "baton/node/adapters/adapter_threads.py": (1, "a fault of a load or an inspection is in its future"),
    "baton/node/encoding/encoder_thread.py": (1, "the work reports its faults to the requests that need it"),
    "baton/node/driver.py": (1, "the thread reports its fault"),
    "baton/node/serve.py": (3, "the drain awaits them"),
    "baton/registry/redis_flights.py": (1, "a read is awaited by who asked"),
    "baton/registry/registry.py": (1, "an operation is awaited by who asked"),
    "baton/text/grammar.py": (1, "a fault of a trial is in its future, which the compilation awaits"),
    "baton/wire/clients/async_generation_client.py": (1, "the client's call awaits it"),
    "baton/wire/clients/generation_client.py": (1, "a client's thread; its calls fail with it"),
    "baton/wire/http2/server.py": (1, "the call's fault barrier answers INTERNAL"),
    "baton/wire/stage_hosts.py": (2, "a connection that fails is closed; the start waits for all hosts"),
    "baton/wire/services/node_service.py": (1, "the stream that it reads for ends, and the link with it"),
    "baton/observe/listener.py": (1, "one connection's handshake; it is closed"),
    "baton/observe/otel.py": (1, "the last spans of a process that ends"),
}
"""Tasks and threads that are not started by baton/background.py: their number in each file, and what a fault does."""


def starters_in(path: Path) -> int:
    """The number of tasks and threads that a file starts without baton/background.py."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = [call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "") for call in calls]
    return sum(name in STARTERS for name in names)


def test_every_task_and_thread_is_watched() -> None:
    """A new task or thread is started by baton/background.py, or listed above with the reason why it need not be."""
    found = {
        str(path.relative_to(ROOT)): count
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if (count := starters_in(path))
    }
    assert found == {file: count for file, (count, _) in GUARDED_OTHERWISE.items()}
