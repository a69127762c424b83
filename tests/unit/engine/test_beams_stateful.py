"""The state machine of test_scheduler_stateful.py with mostly beam searches, on small pools with few seats."""

from __future__ import annotations

from hypothesis import Phase, settings
from hypothesis.stateful import rule

from tests.unit.engine.test_scheduler_stateful import EngineMachine, Sketch, sketches_of


class BeamMachine(EngineMachine):
    """An engine whose clients mostly send beam searches."""

    @rule(sketches=sketches_of([0, 2, 3, 8], most_sequences=2))
    def add(self, sketches: list[Sketch]) -> None:
        self.add_all(sketches)


TestBeamMachine = BeamMachine.TestCase
TestBeamMachine.settings = settings(max_examples=30, stateful_step_count=40, phases=set(Phase) - {Phase.explain})
