"""What the numerics of a GPU name: what decides bits, and nothing of the card or the host beside."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.runner.backends.cuda.cuda_operations import CudaOperations
from baton.runner.backends.cuda.kernels import Kernels
from baton.runner.backends.cuda.numerics import Gpu, gpu_numerics, host_numerics
from baton.runner.backends.torch_operations import TorchOperations
from tests.doubles.fake_attention import fake_paged_attention
from tests.support.load_with import load_tiny

H100, H200, A100 = Gpu("sm_90", 114), Gpu("sm_90", 132), Gpu("sm_80", 108)
KERNELS = {"products": {"triton"}, "attention": {"triton"}}


def test_cards_of_one_capability_are_alike_where_kernels_of_our_own_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"products": 1, "attention": 3}
    monkeypatch.setattr("baton.runner.backends.cuda.numerics.KERNEL_VERSIONS", versions)
    ours = gpu_numerics(H100, KERNELS, 128)
    assert ours == gpu_numerics(H200, KERNELS, 64) != gpu_numerics(A100, KERNELS, 128)
    assert ours.endswith("-products-triton.1-attention-triton.3")
    monkeypatch.setitem(versions, "products", 2)
    assert ours != gpu_numerics(H100, KERNELS, 128)
    of_torch = {**KERNELS, "products": {"cublas"}}
    assert len({gpu_numerics(gpu, of_torch, rows) for gpu in (H100, H200) for rows in (64, 128)}) == 4
    before = gpu_numerics(H100, of_torch, 128)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert before != gpu_numerics(H100, of_torch, 128)


def test_a_model_on_a_gpu_names_what_the_host_has_computed_and_not_its_processor(tmp_path: Path) -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    on_a_gpu = load_tiny(
        tmp_path, "llama", operations=CudaOperations(torch.device("cpu"), Kernels(fake_paged_attention))
    ).model
    assert capability not in on_a_gpu.numerics
    assert f"/torch-{torch.__version__}-{host_numerics()}/" in on_a_gpu.numerics
    assert capability in load_tiny(tmp_path, "llama", operations=TorchOperations(1)).model.numerics
