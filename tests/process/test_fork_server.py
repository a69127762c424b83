"""Nodes are forked by a process that has imported torch, and look and end as programs do; without it they start too."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from baton.processes.process_stat import process_stat
from tests.support.process_cluster import ProcessCluster, process_cluster, wait_until_ended

START_S = 50.0
"""The longest wait for a node that starts as a program, which takes five seconds: half of the test's time limit."""


def children(pid: int) -> dict[int, tuple[str, str]]:
    """The state (proc(5), Z is a zombie) and the command line of each child of a process."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            stat = process_stat(int(process.name))
            if stat.parent == pid:
                found[int(process.name)] = stat.state, (process / "cmdline").read_text().replace("\0", " ").strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def fork_server(cluster: ProcessCluster) -> int:
    named = [pid for pid, (_, command) in children(cluster.state.pid).items() if command == "baton fork-server"]
    return named[0]


async def test_forked_nodes_are_the_supervisors_children_end_with_it_and_start_without_the_fork_server(
    model: Path, tmp_path: Path
) -> None:
    with process_cluster(tmp_path / "run", model, "--threads", "1", as_program=True) as cluster:
        preloaded = fork_server(cluster)
        # A fork takes no other thread along.
        assert len(os.listdir(f"/proc/{preloaded}/task")) == 1
        ours = children(cluster.state.pid)
        for name in ("prefill-0", "decode-0"):
            _, command = ours[cluster.process(name).pid]
            assert f"-m baton.cli.main node --host 127.0.0.1 --cluster default --model {model} " in command
            assert f"--node-id {name} " in command
        router = cluster.process("router-0")
        wait_until_ended([router.pid], lambda: os.kill(router.pid, signal.SIGKILL))
        async with cluster.session() as session:
            await session.wait_until_replaced(router)
            await session.wait_until_replaced(cluster.signal("decode-0", signal.SIGKILL))
            # The router's own child had no parent any more.
            assert [command for state, command in children(cluster.state.pid).values() if state == "Z"] == []
            assert fork_server(cluster) == preloaded

            # One that does not answer is given up, and nodes start as programs.
            os.kill(preloaded, signal.SIGSTOP)
            async with asyncio.timeout(START_S):
                await session.wait_until_replaced(cluster.signal("decode-0", signal.SIGKILL))
            assert preloaded not in children(cluster.state.pid)
        log = cluster.log.read_text()
        assert log.count("the fork server is lost") == 1

        started = list(children(cluster.state.pid))
        # The forked node can't see by itself that its supervisor is gone.
        os.kill(cluster.process("prefill-0").pid, signal.SIGSTOP)
        supervisor = cluster.state.pid
        wait_until_ended(started, lambda: os.kill(supervisor, signal.SIGKILL))
