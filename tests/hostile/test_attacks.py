"""Whoever attacks a router keeps nobody else from being served, holds no loop, and leaves nothing behind.

Each attack is a line of a table (`http2_attacks.py`, `http1_attacks.py`, `grpc_attacks.py`, `request_attacks.py`).
Beside it two clients ask for tokens. By turns they meet a cluster with keys and certificates and one without;
`BATON_HOSTILE=long` gives every attack ten seconds in both, and `BATON_HOSTILE_TABLE=FILE` takes down what was seen
(table.py).
"""

from __future__ import annotations

import pytest

from tests.hostile.attacker import ATTACKS
from tests.hostile.conftest import MODES, RUNS_LONG, Stage
from tests.hostile.table import Row, write_row
from tests.hostile.witness import PeakMemory

HELD_S = 0.1
"""No turn of an event loop may take more of a core. By the clock of the processor: others may need it, too."""
_LOSSES = ("NodeLost", "NodeSuspect", "NodeLeft", "RouterLeft", "RegistryLost", "BreakerOpened", "ClusterUnavailable")


_CASES = [
    (mode, name)
    for parity, mode in enumerate(MODES)
    for number, name in enumerate(ATTACKS)
    if RUNS_LONG or number % len(MODES) == parity
]


@pytest.mark.parametrize(("stage", "name"), _CASES, indirect=["stage"], scope="module")
def test_an_attack_is_noticed_by_nobody_else(stage: Stage, name: str) -> None:
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
    assert stage.victim.told["grpc"] > 0 < stage.victim.told["http"]
    assert {process: f"{longest} s" for process, longest in held.items() if longest > HELD_S} == {}
    assert calm.left == []
    assert stage.pids() == pids
    assert [event for event in list(stage.operator.events())[events:] if event.reason in _LOSSES] == []
    assert router.attempts() == router_before.attempts()
    # It was there, and nothing that it did was taken for a fault of ours.
    assert answers
    assert not {answer for answer in answers if answer.startswith("5") and answer != "503"}, answers
