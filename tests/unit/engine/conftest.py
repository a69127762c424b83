"""An engine with the limits that most tests of the scheduler want; others make their own."""

from __future__ import annotations

import pytest

from tests.support.engine_rig import EngineRig


@pytest.fixture
def rig() -> EngineRig:
    return EngineRig()
