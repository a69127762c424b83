"""Clusters start and stop: in the background, side by side, in unusual directories. Most are simulated, to be fast."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from baton.cli.cluster.run_dir import RunDir
from baton.cli.cluster.state import ClusterState
from tests.process.shell import Shell, refusal, wait_until_ended
from tests.support.slow_model import FLAGS, STEP_TIMES

QUICK = ("--runner", "simulated", "--kv-cache-memory", "8MiB", "--grpc-port", 0)
ASK = ("generate", "--token-ids", "1,2,3", "--max-tokens", 4, "--temperature", 0, "-o", "json")


def test_up_detach_serves_and_down_stops_everything_and_may_be_repeated(shell: Shell) -> None:
    place = shell.home / "baton"
    started = shell.baton("up", "--detach", *QUICK, "-o", "json")
    assert (started.returncode, started.stderr) == (0, "")
    state = json.loads(started.stdout)
    assert state["phase"] == "ready"
    assert {p["name"]: p["status"] for p in state["processes"]} == dict.fromkeys(
        ("redis", "prefill-0", "decode-0", "router-0"), "Ready"
    )
    pids = {state["pid"], *(p["pid"] for p in state["processes"])}
    assert pids == set(shell.remaining_processes())
    assert {p.stat().st_mode & 0o077 for p in (place, *place.iterdir())} == {0}
    answer = json.loads(shell.baton(*ASK).stdout)
    assert answer["usage"]["completion_tokens"] == 4
    assert "prompt: this model is served without a tokenizer" in refusal(shell.baton("generate", "text"), 2)

    stopped = shell.baton("down", "-o", "json")
    assert json.loads(stopped.stdout) == {
        "version": 1,
        "run_dir": str(place),
        "was_running": True,
        "running": False,
    }
    assert all(wait_until_ended(pid) for pid in pids)
    assert sorted(path.name for path in place.iterdir()) == ["lock", "logs"]
    again = shell.baton("down")
    assert (again.returncode, again.stdout) == (0, f"no cluster is running in {place}\n")
    assert refusal(shell.baton(*ASK), 5).startswith(f"no cluster is running in {place}: start one with `baton up`")


def test_two_clusters_on_one_machine_do_not_disturb_each_other(shell: Shell, tmp_path: Path) -> None:
    places = [tmp_path / "one", tmp_path / "two"]
    with ExitStack() as stack:
        states = [stack.enter_context(shell.up(*QUICK, "--cluster", place.name, run_dir=place)) for place in places]
        assert len({p.pid for state in states for p in state.processes}) == 8
        listed = [json.loads(shell.baton("get", "nodes", "-o", "json", "--run-dir", place).stdout) for place in places]
        for state, found in zip(states, listed, strict=True):
            ours = {p.pid for p in state.processes if p.role != "redis"}
            assert {node["pid"] for node in found["items"]} == ours
        answers = [json.loads(shell.baton(*ASK, "--run-dir", place).stdout) for place in places]
        assert answers[0]["token_ids"] == answers[1]["token_ids"]
        assert shell.baton("down", "--run-dir", places[0]).returncode == 0
        assert json.loads(shell.baton("status", "-o", "json", "--run-dir", places[1]).stdout)["health"] == "ok"
        assert shell.baton("status", "--run-dir", places[0]).returncode == 5
        assert shell.baton("down", "--run-dir", places[1]).returncode == 0


def test_a_drain_that_takes_too_long_can_be_forced(shell: Shell, tmp_path: Path) -> None:
    shell.environment |= STEP_TIMES
    where = ("--run-dir", tmp_path / "run")
    words = ("generate", "--token-ids", "1,2,3", "--max-tokens", 4000, "-o", "json", *where)
    with (
        shell.up(*FLAGS, "--grpc-port", 0, run_dir=where[1]),
        shell.start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as client,
    ):
        running = 0
        while not running:
            assert client.poll() is None
            nodes = json.loads(shell.baton("get", "nodes", "-o", "json", *where).stdout)
            running = sum(node["running"] for node in nodes["items"])
        said = refusal(shell.baton("down", "--timeout", "0", *where), 6)
        assert said.endswith(
            f"is still draining after 0 s: repeat `baton down --run-dir {where[1]}` to wait longer, "
            f"or stop it at once with `baton down --force --run-dir {where[1]}`"
        )
        assert shell.baton("down", "--force", *where).returncode == 0
        client.communicate()
    assert client.returncode not in (0, 130)


def test_a_run_directory_whose_path_is_too_long_for_a_socket_works(shell: Shell, tmp_path: Path) -> None:
    place = tmp_path / ("long" * 40)
    with shell.up(*QUICK, run_dir=place):
        elsewhere = [
            word for p in shell.remaining_processes().values() for word in p.split() if word.endswith("redis.sock")
        ]
        assert elsewhere
        assert shell.baton(*ASK, "--run-dir", place).returncode == 0
        assert shell.baton("down", "--run-dir", place).returncode == 0
    assert not any(Path(word.removeprefix("unixsocket:")).parent.exists() for word in elsewhere)


def test_a_run_directory_in_a_project_keeps_the_projects_own_logs(shell: Shell) -> None:
    (shell.home / "logs").mkdir()
    (shell.home / "logs" / "mine.log").write_text("mine")
    (shell.home / "logs" / "prefill-0.log").write_text("of a cluster before\n")
    shell.home.chmod(0o700)
    with shell.up(*QUICK, run_dir=shell.home):
        assert shell.baton("down", "--run-dir", ".").returncode == 0
    assert (shell.home / "logs" / "mine.log").read_text() == "mine"
    assert "of a cluster before" not in (shell.home / "logs" / "prefill-0.log").read_text()


def test_a_killed_supervisor_leaves_no_process_and_its_run_directory_can_be_reused(shell: Shell) -> None:
    with shell.up(*QUICK) as state:
        os.kill(state.pid, signal.SIGKILL)
        for process in state.processes:
            assert wait_until_ended(process.pid)
    assert "no cluster is running" in refusal(shell.baton("status"), 5)
    shown = shell.baton("up", "-d", *QUICK)
    assert (shown.returncode, shown.stderr) == (0, "")
    # In the default run directory no flag is needed.
    assert "--run-dir" not in shown.stdout
    assert shown.stdout.endswith("baton down stops it.\n")
    assert shell.baton(*ASK).returncode == 0
    assert shell.run(["sh", "-c", "baton down"]).stdout == f"stopped the cluster in {shell.home / 'baton'}\n"


def test_an_interrupted_start_leaves_no_process(shell: Shell, model: Path, tmp_path: Path) -> None:
    """Ctrl-C of `baton up --detach`, as soon as its supervisor has begun to start processes."""
    words = ("up", "--detach", "--model", model, "--grpc-port", 0, "--run-dir", tmp_path / "run")
    with shell.start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as starting:
        place = RunDir(tmp_path / "run")
        while not (place.exists() and (state := place.read_state()) and any(p.pid for p in state.processes)):
            assert starting.poll() is None
        starting.send_signal(signal.SIGINT)
        said = b"baton: interrupted: the cluster is not started, and no process of it is left\n"
        assert starting.communicate() == (b"", said)
    assert starting.returncode == 130
    shell.assert_nothing_left()
    assert place.read_state() is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "baton-test", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root can mount a file system")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path) -> None:
    """Fill the disk, so that not a byte more fits into a new file or a log."""
    for path in (disk / "full", *disk.glob("**/*.log")):
        with open(path, "ab", buffering=0) as file, suppress(OSError):
            while file.write(b"x" * 4096):
                pass


def test_a_full_disk_is_reported_before_any_process_starts(shell: Shell, small_disk: Path) -> None:
    fill(small_disk)
    for place in (small_disk, small_disk / "run"):
        for detached in ((), ("-d",)):
            said = refusal(shell.baton("up", *detached, *QUICK, "--run-dir", place), 78)
            assert said == f"run directory {place} can't be used (No space left on device): name another with --run-dir"
            shell.assert_nothing_left()


def test_a_disk_that_fills_up_does_not_end_a_cluster(shell: Shell, small_disk: Path) -> None:
    place = RunDir(small_disk / "run")
    # What the supervisor prints finds no room, either, as that of a detached one.
    with shell.up(*QUICK, run_dir=place.path, log=small_disk / "up.log") as state:
        fill(small_disk)
        for name in ("redis", "decode-0"):
            kill(state, name)
        wait_until_whole(shell, state, "decode-0", "--address", state.operator_address)
        assert shell.baton(*ASK, "--run-dir", place.path).returncode == 0
        assert not list(place.path.glob(".cluster-*"))

        # With room again, the next change is written with everything that was missed.
        (small_disk / "full").unlink()
        kill(state, "prefill-0")
        wait_until_whole(shell, state, "prefill-0", "--run-dir", place.path)
        now = place.read_state()
        assert now is not None
        assert {p.name: p.restarts for p in now.processes} == {"redis": 1, "prefill-0": 1, "decode-0": 1, "router-0": 0}
        assert shell.baton("down", "--run-dir", place.path).returncode == 0


def kill(state: ClusterState, name: str) -> None:
    pid = next(process.pid for process in state.processes if process.name == name)
    os.kill(pid, signal.SIGKILL)
    assert wait_until_ended(pid)


def wait_until_whole(shell: Shell, before: ClusterState, killed: str, *where: object) -> None:
    """Wait until the cluster is whole and a killed process is replaced. Each poll runs a command."""
    dead = next(process.pid for process in before.processes if process.name == killed)
    while True:
        found = json.loads(shell.baton("status", "-o", "json", *where).stdout)
        pids = {node["pid"] for node in found["nodes"] if node["status"] == "Ready"}
        if found["health"] == "ok" and len(pids) == 3 and dead not in pids:
            return


def test_a_read_only_run_directory_is_refused(shell: Shell, small_disk: Path) -> None:
    (small_disk / "old").mkdir(mode=0o700)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for place in (small_disk / "old", small_disk / "new"):
        said = refusal(shell.baton("up", *QUICK, "--run-dir", place), 78)
        assert said == f"run directory {place} can't be used (Read-only file system): name another with --run-dir"
        assert "no cluster is running" in refusal(shell.baton("status", "--run-dir", place), 5)


def test_a_file_in_place_of_the_run_directory_is_refused(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for words in (("up", *QUICK), ("status",), ("down",)):
        said = refusal(shell.baton(*words, "--run-dir", tmp_path / "file"), 78)
        assert said == f"run directory {tmp_path / 'file'} is not a directory: name another with --run-dir"
    said = refusal(shell.baton("up", *QUICK, "--run-dir", tmp_path / "file" / "run"), 78)
    assert said.endswith("can't be used (Not a directory): name another with --run-dir") or "File exists" in said
