"""Step times of nodes that share a machine."""

from __future__ import annotations

import pytest

from baton.bench.simulator.config import Contention
from baton.bench.simulator.events import SharedHost, Timeline


class Machine:
    """A shared host that records when its steps end."""

    def __init__(self, contention: Contention) -> None:
        self.timeline = Timeline()
        self.host = SharedHost(self.timeline, contention)
        self.ends: dict[str, float] = {}

    def compute(self, name: str, at_s: float, alone_s: float, *, has_prompts: bool = False) -> None:
        def over() -> None:
            self.ends[name] = self.timeline.now

        def begin() -> None:
            self.host.compute(alone_s, has_prompts, over)

        self.timeline.call_at(at_s, begin)


def test_a_single_step_runs_at_full_speed() -> None:
    machine = Machine(Contention(1.0, 1.0))
    machine.compute("first", 1.0, 0.5)
    machine.compute("second", 1.5, 0.5)
    machine.timeline.run()
    assert machine.ends == pytest.approx({"first": 1.5, "second": 2.0})


def test_a_step_is_slower_only_while_another_one_runs() -> None:
    machine = Machine(Contention(prefill=1.0, decode=0.5))
    machine.compute("prompt", 0.0, 10.0, has_prompts=True)
    machine.compute("stream", 2.0, 2.0)  # takes 3 s, in which the prompt advances by 1.5 s
    machine.timeline.run()
    assert machine.ends == pytest.approx({"stream": 5.0, "prompt": 11.5})


def test_the_slowdown_grows_with_each_node_and_ends_when_a_step_is_cancelled() -> None:
    machine = Machine(Contention(decode=1.0))
    for name in ("a", "b"):
        machine.compute(name, 0.0, 3.0)
    cancelled = machine.host.compute(100.0, False, lambda: pytest.fail("a cancelled step has ended"))
    machine.timeline.call_at(3.0, cancelled.cancel)  # until then each step ran at a third of its speed
    machine.timeline.call_at(4.0, cancelled.cancel)
    machine.timeline.run()
    assert machine.ends == pytest.approx({"a": 7.0, "b": 7.0})
