"""The demo when prompts fail: it says which and why, ends with 1, and keeps logs that say more."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.cli import demo_run
from baton.cli.demo_run import DemoFailed, run_demo
from baton.errors import EngineFault, ExitCode
from baton.messages.generation import Accepted, Chunk
from baton.wire.server.server import RpcServer
from baton.wire.services import generation_service
from baton.wire.services.generation_service import GenerationServicer
from tests.doubles.fake_generation_handler import FakeGenerationHandler


@pytest.fixture(autouse=True)
def directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's directories are in that of the test, and it leaves the handlers of signals alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(signal, "signal", lambda *_: None)


async def demo_on(handler: FakeGenerationHandler, log: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs the demo with a cluster whose router is this fake, and whose processes have written this log."""
    server = RpcServer((generation_service.SERVICE_NAME,))
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    GenerationServicer(handler).add_to_server(server.server)

    @contextmanager
    def cluster(run_dir: Path, *_: Any) -> Iterator[dict[str, str]]:
        (run_dir / "logs").mkdir()
        (run_dir / "logs" / "router-0.log").write_text(log)
        yield {"grpc_address": address}

    monkeypatch.setattr(demo_run, "_cluster", cluster)
    await server.start()
    try:
        return await asyncio.to_thread(run_demo, None)
    finally:
        await server.stop(0)


def found(directory: Path, pattern: str) -> list[Path]:
    return list(directory.glob(pattern))


@pytest.mark.parametrize("log", ["a line\n", ""])
async def test_prompts_that_fail_are_named_and_the_demo_fails(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = FakeGenerationHandler(
        EngineFault("the logits are not finite"), Accepted("r", 5, 3), Chunk(0, [7], "a", [])
    )
    with pytest.raises(DemoFailed) as caught:
        await demo_on(handler, log, monkeypatch)
    assert caught.value.exit_code is ExitCode.FAILED
    assert str(caught.value).startswith("4 of 4 prompts failed; all processes are stopped")
    printed = capsys.readouterr().out
    assert printed.count("the logits are not finite") == 4
    assert printed.count("  failed\n") == 4
    assert "All processes are stopped" not in printed
    kept = found(tmp_path, "baton-demo-*/logs")
    assert len(kept) == bool(log)
    assert str(caught.value).endswith(f"their logs are in {kept[0]}" if kept else "all processes are stopped")


async def test_a_demo_whose_prompts_are_answered_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await demo_on(FakeGenerationHandler(), "a line\n", monkeypatch) == ExitCode.OK
    assert capsys.readouterr().out.endswith("All processes are stopped.\n")
    assert not found(tmp_path, "*")


def test_the_logs_of_a_cluster_that_does_not_start_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def up(*words: str) -> subprocess.CompletedProcess[str]:
        if words[0] == "down":
            return subprocess.CompletedProcess(words, 0, "", "")
        log = Path(words[words.index("--run-dir") + 1]) / "logs" / "prefill-0.log"
        log.parent.mkdir()
        log.write_text("config.json\n")
        return subprocess.CompletedProcess(words, 78, "", f"baton: prefill-0 did not start: it ends (log: {log})\n")

    monkeypatch.setattr(demo_run, "_baton", up)
    with pytest.raises(DemoFailed, match=r"^prefill-0 did not start: it ends \(log: ") as caught:
        run_demo(None)
    assert caught.value.exit_code is ExitCode.BAD_CONFIG
    (kept,) = found(tmp_path, "baton-demo-*/logs/prefill-0.log")
    assert str(kept) in str(caught.value)
