"""Pinning nodes to cores: all processes of a node are pinned, those that it has started included."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from baton.bench.live_cluster import pin_nodes, processes_of
from baton.messages.operator import NodeStatus


@contextmanager
def parent_and_child() -> Iterator[list[int]]:
    """The ids of a process and of one that it has started, which end with the block."""
    words = ["sh", "-c", "exec 3<&0; cat <&3 >&2 & echo $!; wait"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        yield [parent.pid, int(parent.stdout.readline())]
        parent.stdin.close()


def test_processes_that_a_node_has_started_belong_to_it() -> None:
    with parent_and_child() as pids:
        assert sorted(processes_of([pids[0]])) == sorted(pids)
        assert set(pids) < set(processes_of([os.getpid()]))
    assert processes_of([pids[0]]) == [pids[0]], "they have ended"


def test_a_node_has_its_cores_with_all_its_processes() -> None:
    cores = sorted(os.sched_getaffinity(0))
    with parent_and_child() as first, parent_and_child() as second:
        nodes = [
            NodeStatus(name, "decode", "Ready", f"{name}.1", "h:1", pids[0], "m", 0, 0, 0.0)
            for name, pids in (("d1", second), ("d0", first))
        ]
        assert pin_nodes(nodes, cores) == {"d0": cores[0], "d1": cores[1 % len(cores)]}
        for core, pids in ((cores[0], first), (cores[1 % len(cores)], second)):
            assert [os.sched_getaffinity(pid) for pid in pids] == [{core}, {core}]
        pin_nodes(nodes, cores, per_node=2)
        for places, pids in (((0, 1), first), ((2, 3), second)):
            own = {cores[place % len(cores)] for place in places}
            assert [os.sched_getaffinity(pid) for pid in pids] == [own, own]
