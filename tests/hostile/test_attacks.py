"""An attack on a router disturbs no other client, blocks no event loop, and leaves nothing behind.

Each attack is an entry of a table (`http2_attacks.py`, `http1_attacks.py`, `grpc_attacks.py`, `request_attacks.py`).
Beside it two clients ask for tokens. The attacks alternate between a cluster with keys and certificates and one
without; `BATON_HOSTILE=long` runs each of them for ten seconds on both, and `BATON_HOSTILE_TABLE=FILE` records the
measurements (table.py).
"""

from __future__ import annotations

import pytest

from tests.hostile.attacker import ATTACKS
from tests.hostile.conftest import MODES, RUNS_LONG, Stage
from tests.hostile.table import Row, write_row
from tests.hostile.witness import PeakMemory

HELD_S = 0.1
"""No turn of an event loop may take more CPU seconds. Wall time is not bounded: others use the cores, too."""
_LOSSES = ("NodeLost", "NodeSuspect", "NodeLeft", "RouterLeft", "RegistryLost", "BreakerOpened", "ClusterUnavailable")


_CASES = [
    (mode, name)
    for parity, mode in enumerate(MODES)
    for number, name in enumerate(ATTACKS)
    if RUNS_LONG or number % len(MODES) == parity
]


@pytest.mark.parametrize(("stage", "name"), _CASES, indirect=["stage"], scope="module")
def test_an_attack_disturbs_no_other_client_and_leaves_nothing_behind(stage: Stage, name: str) -> None:
    pids, events = stage.pids(), len(list(stage.operator.events()))
    before, peak = stage.watched.read(), PeakMemory(pids["router-0"][0])
    answers = stage.attack(name)
    during, most = stage.watched.read(), peak.bytes()
    calm = stage.watched.calm(before)
    held = {process: during[process].longest_since(before[process], cpu=True) for process in during}
    router, router_before = calm.after["router-0"], before["router-0"]
    write_row(
        Row(
            attack=name,
            mode=stage.mode,
            held_cpu_ms=held["router-0"] * 1e3,
            held_wall_ms=during["router-0"].longest_since(router_before, cpu=False) * 1e3,
            memory_before_mb=router_before.memory / 1e6,
            memory_peak_mb=most / 1e6,
            memory_after_mb=router.memory / 1e6,
            calm_after_s=calm.waited_s,
            waited_for=calm.waited_for,
            victim_longest_ms=stage.victim.longest_s * 1e3,
            attacker_was_told=answers,
        )
    )
    assert not stage.victim.wrong
    assert stage.victim.num_answers["grpc"] > 0 < stage.victim.num_answers["http"]
    assert {process: f"{longest} s" for process, longest in held.items() if longest > HELD_S} == {}
    assert calm.left == []
    assert stage.pids() == pids
    assert [event for event in list(stage.operator.events())[events:] if event.reason in _LOSSES] == []
    assert router.attempts() == router_before.attempts()
    # The attack reached the router, and none of it was answered as an internal error.
    assert answers
    assert not {answer for answer in answers if answer.startswith("5") and answer != "503"}, answers
