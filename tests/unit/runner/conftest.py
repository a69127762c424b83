"""What tests of several modules of `baton.runner` use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.runner.backends.cpu import kernels


@pytest.fixture(autouse=True)
def instruction_set_is_reset() -> Iterator[None]:
    """Let the kernels choose their instructions again after a test that has chosen some."""
    yield
    if kernels.available():
        kernels.use_isa(None)
