"""The registry's password is in nothing that other users can read: no command line, no file, no log."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

from tests.process.shell import Shell
from tests.support.redis_server import RedisProcess

SECRET = b"secret"


def test_the_password_of_the_registry_is_in_no_command_line_file_or_log(shell: Shell, tmp_path: Path) -> None:
    redis, run_dir = RedisProcess(tmp_path), shell.home / "run"
    with asyncio.Runner() as runner:
        runner.run(redis.start())
        told = {"BATON_REGISTRY": redis.url_of("c")}
        up = ("up", "-d", "--cluster", "c", "--runner", "simulated", "--grpc-port", "0", "--run-dir", run_dir)
        try:
            started = shell.baton(*up, "-o", "json", environment=told)
            assert started.returncode == 0, started.stderr
            state = json.loads(started.stdout)
            processes = [process["pid"] for process in state["processes"]]
            assert len(processes) == 3
            for pid in (*processes, state["pid"]):
                assert SECRET not in Path(f"/proc/{pid}/cmdline").read_bytes()
            shown = shell.baton("config", "view", "--origin", environment=told).stdout + shell.baton("doctor").stdout
            assert "secret" not in started.stdout + shown
            for path in run_dir.rglob("*"):
                if path.is_file():
                    assert SECRET not in path.read_bytes(), path
                    assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
        finally:
            down = shell.baton("down", "--run-dir", run_dir)
            runner.run(redis.stop())
    assert down.returncode == 0, down.stderr
