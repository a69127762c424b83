"""What tests of several modules of `baton.runner` use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.runner.backends.cpu import kernels


@pytest.fixture(autouse=True)
def instruction_set_is_reset() -> Iterator[None]:
    """Let the kernels choose their instructions again after a test that has chosen some."""
    # Asked before the test: it may choose instructions that the processor lacks, and the answer computes with them.
    has_kernels = bool(kernels.available())
    yield
    if has_kernels:
        kernels.use_isa(None)
