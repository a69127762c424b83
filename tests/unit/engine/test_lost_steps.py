"""A runner that raises: the next step repeats what the lost step was to tell it."""

from __future__ import annotations

from typing import get_args

import pytest

from baton.messages.node import Outcome
from tests.support.engine_rig import EngineRig
from tests.support.executors import Ahead, executor_for


@pytest.mark.parametrize("ahead", get_args(Ahead))
def test_requests_that_ended_before_a_lost_step_are_reported_again(ahead: Ahead) -> None:
    rig = EngineRig(executor=executor_for(ahead))
    rig.add("long", 8, max_tokens=20)
    rig.add("ends", 8, max_tokens=3)
    while "ends" not in rig.ends:
        rig.step()
    rig.runner.raise_first = RuntimeError("broken")
    while "long" not in rig.ends:
        rig.step()
    assert rig.reason("long") is Outcome.ERROR
    rig.run()
    rig.add("after", 8, max_tokens=6)
    rig.steps(4)
    assert rig.runner.num_requests == 1
    rig.run_right("after")


def test_a_new_request_under_an_ended_id_is_not_forgotten() -> None:
    rig = EngineRig(executor=executor_for("late"))
    rig.add("r", 8, max_tokens=9)
    rig.begin("other", 8, max_tokens=9)
    rig.step()
    rig.abort("r")
    rig.step()
    del rig.ends["r"]
    rig.runner.raise_first = RuntimeError("broken")
    rig.complete("r", 8, max_tokens=9)
    assert rig.reason("other") is Outcome.ERROR
    assert rig.reason("r") is Outcome.LENGTH
    assert rig.tokens["r"] == rig.expected("r", 9)
