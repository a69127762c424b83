"""Which build of NIXL a process loads, and with which defaults of UCX."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kv_transfer.backends import nixl


@pytest.mark.parametrize(
    ("cuda", "installed", "loaded"),
    [
        (None, {"nixl_cu12", "nixl_cu13"}, "nixl_cu13"),
        (None, {"nixl_cu12"}, "nixl_cu12"),
        ("13.0", {"nixl_cu12", "nixl_cu13"}, "nixl_cu13"),
        ("12.8", {"nixl_cu12", "nixl_cu13"}, "nixl_cu12"),
        ("12.8", {"nixl_cu13"}, "there is no nixl_cu12, and torch is built for CUDA 12.8"),
        (None, set(), "there is no nixl_cu13 or nixl_cu12 or nixl_rocm"),
    ],
)
def test_a_build_for_torchs_cuda_is_loaded_or_any_without_cuda(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, installed: set[str], loaded: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=cuda)))
    monkeypatch.setattr(nixl, "find_spec", lambda name: name if name in installed else None)
    if loaded in installed:
        assert nixl._nixl_package() == loaded
    else:
        with pytest.raises(ImportError, match=loaded):
            nixl._nixl_package()


def test_ucx_watches_memory_where_it_may_register_some(tmp_path: Path) -> None:
    def is_watched(kind: str) -> bool:
        return "UCX_MEM_EVENTS" not in nixl.ucx_defaults(kind, tmp_path / "infiniband")

    assert (is_watched("DRAM"), is_watched("VRAM")) == (False, True)
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert is_watched("DRAM")
