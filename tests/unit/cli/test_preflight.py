"""What `baton up` says before it starts a cluster whose nodes have no C kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.cli.cluster.supervisor.preflight import why_slow
from baton.config import UpConfig
from baton.runner.backends.cpu import kernel_file


@pytest.mark.parametrize(
    ("settings", "is_told"), [({}, True), ({"runner": "simulated"}, False), ({"device": "cuda:1"}, False)]
)
def test_missing_kernels_are_told_where_they_would_be_used(
    settings: dict[str, str], is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = UpConfig.model_validate(settings)
    assert why_slow(config) == ""
    monkeypatch.setattr(kernel_file, "LIBRARY", tmp_path / "libkernels.so")
    said = why_slow(config)
    assert ("install a C compiler" in said and "twelve times as long" in said) is is_told
    assert bool(said) is is_told
