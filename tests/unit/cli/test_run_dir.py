"""The run directory of a cluster: private, locked by one process, and free when that process has ended."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.cli.cluster.run_dir import RunDir, default_run_dir
from baton.cli.cluster.state import ClusterState, ProcessState, start_time
from baton.cli.target import cluster_flag
from baton.errors import ConfigError

STATE = ClusterState(
    "c",
    "ready",
    1,
    2,
    3.5,
    "m",
    "auto",
    "h:1",
    "h:2",
    (ProcessState("n", "decode", "Ready", 1, 2, 0, "", "", "", "l", ""),),
)


def test_the_default_run_directory_belongs_to_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_run_dir({"BATON_RUN_DIR": "/a", "XDG_RUNTIME_DIR": "/b"}) == Path("/a")
    assert default_run_dir({"XDG_RUNTIME_DIR": "/b"}) == Path("/b/baton")
    assert default_run_dir({}).name == f"baton-{os.getuid()}"


def test_the_run_directory_is_private(tmp_path: Path) -> None:
    place = RunDir(tmp_path / "deep" / "run")
    assert not place.exists()
    place.create()
    place.create()
    assert place.path.stat().st_mode & 0o777 == 0o700
    place.lock()
    place.write_state(STATE)
    assert {p.stat().st_mode & 0o777 for p in place.path.iterdir() if p.is_file()} == {0o600}
    assert place.read_state() == STATE
    place.release()


def test_a_directory_that_others_can_write_or_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by others: chmod 700"):
        RunDir(tmp_path / "open").create()
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is not a directory"):
        RunDir(tmp_path / "link").create()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a directory"):
        RunDir(tmp_path / "file").exists()
    with pytest.raises(ConfigError, match="can't be used"):
        RunDir(tmp_path / "file" / "run").create()


def test_only_one_cluster_can_hold_the_lock(tmp_path: Path) -> None:
    first, second = RunDir(tmp_path / "run"), RunDir(tmp_path / "run")
    first.create()
    assert second.holder() is None
    first.lock()
    assert second.holder() == os.getpid()
    with pytest.raises(
        ConfigError, match=r"a cluster is already running in .*: stop it with `baton down --run-dir .*`"
    ):
        second.lock()
    found = second.holders(timeout_s=0.0)
    assert next(found) == os.getpid()
    with pytest.raises(TimeoutError):
        next(found)
    first.write_state(STATE)
    found = second.holders(timeout_s=60.0)
    assert next(found) == os.getpid()
    first.release()
    assert list(found) == []
    assert second.read_state() is None
    second.lock()
    second.release()


def test_reading_the_holder_does_not_take_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = RunDir(tmp_path / "run")
    place.create()
    place.lock()
    place.release()
    reader = os.open(tmp_path / "run" / "lock", os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    waited = []

    def stop_reading(seconds: float) -> None:
        waited.append(seconds)
        os.close(reader)

    monkeypatch.setattr("baton.cli.cluster.run_dir.time.sleep", stop_reading)
    place.lock()
    assert len(waited) == 1
    place.release()


def test_a_second_holder_is_yielded_as_well(tmp_path: Path) -> None:
    place = RunDir(tmp_path / "run")
    place.create()
    place.lock()
    found = RunDir(tmp_path / "run").holders(timeout_s=60.0)
    assert next(found) == os.getpid()
    (tmp_path / "run" / "lock").write_bytes(b"7\n" + bytes(20))
    assert next(found) == 7
    place.release()
    assert list(found) == []


def test_the_lock_of_a_killed_holder_is_free(tmp_path: Path) -> None:
    script = (
        "import signal, sys; from pathlib import Path; from baton.cli.cluster.run_dir import RunDir; "
        "place = RunDir(Path(sys.argv[1])); place.create(); place.lock(); print('locked', flush=True); signal.pause()"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "run")], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    with holder.stdout:
        holder.stdout.readline()
    place = RunDir(tmp_path / "run")
    assert place.holder() == holder.pid
    holder.kill()
    holder.wait()
    assert place.holder() is None
    place.lock()
    place.release()


def test_an_invalid_state_file_is_named_in_the_error(tmp_path: Path) -> None:
    place = RunDir(tmp_path / "run")
    place.create()
    for content in ("{", "[]", "{}", '{"processes": [{}]}'):
        (place.path / "cluster.json").write_text(content)
        with pytest.raises(ConfigError, match=r"cluster\.json can't be read"):
            place.read_state()


def test_a_start_time_identifies_a_process() -> None:
    assert start_time(os.getpid()) == start_time(os.getpid()) > 0
    assert start_time(2**22 + 1) == 0


def test_a_command_in_a_message_names_the_cluster_unless_it_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_RUN_DIR", str(tmp_path / "default"))
    assert RunDir(tmp_path / "default").command("down") == "`baton down`"
    assert RunDir(tmp_path / "my run").command("down --force") == f"`baton down --force --run-dir '{tmp_path}/my run'`"
    assert cluster_flag(None, None) == cluster_flag(None, tmp_path / "default") == ""
    assert cluster_flag(None, tmp_path / "other") == f" --run-dir {tmp_path}/other"
    assert cluster_flag("gpu-1:9000", tmp_path / "other") == " --address gpu-1:9000"
