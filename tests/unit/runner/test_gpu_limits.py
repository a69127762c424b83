"""What a GPU must have for a node, and how large its KV cache is: decided from facts, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from baton.errors import ConfigError
from baton.runner.gpu_facts import driver_version, gpus_here
from baton.runner.gpu_limits import GpuFacts, GpuProcess, check_gpu, room_for_cache, why_driver_too_old
from baton.runner.model import cached_model
from baton.runner.model.checkpoint import least_weight_bytes, weight_files_of
from baton.runner.model.random_model import write_random_model
from baton.runner.spec import CacheSpec
from tests.support.load_with import load_tiny
from tests.support.tiny_models import TINY_MODELS

GIB = 1 << 30
H100 = GpuFacts("NVIDIA H100", 80 * GIB, 78 * GIB)
OTHER = GpuProcess(4711, "python", 60 * GIB)


@pytest.mark.parametrize(
    ("driver", "cuda", "is_too_old"),
    [
        ("535.104.05", "13.0", "580.65.06"),
        ("580.65.05", "13.0", "580.65.06"),
        ("580.65.06", "13.0", ""),
        ("1000.1", "13.0", ""),
        ("535.104.05", "12.8", ""),
        ("470.223.02", "12.8", "525.60.13"),
        ("", "13.0", ""),
        ("535.104.05", "", ""),
        ("535.104.05", "99.1", ""),
    ],
)
def test_a_driver_is_too_old_for_a_major_version_of_cuda(driver: str, cuda: str, is_too_old: str) -> None:
    reason = why_driver_too_old(driver, cuda)
    assert bool(reason) == bool(is_too_old)
    assert not is_too_old or (driver in reason and is_too_old in reason)


def test_a_gpu_with_room_is_taken() -> None:
    check_gpu(H100, "cuda:0", 70 * GIB, 8 * GIB)
    check_gpu(replace(H100, processes=(OTHER,)), "cuda:0", 70 * GIB, 0)
    check_gpu(replace(H100, compute_mode="Exclusive_Process"), "cuda:0", 70 * GIB, 0)


@pytest.mark.parametrize(
    ("gpu", "weights", "cache", "said"),
    [
        (H100, 79, 0, "78.00 GiB free of 80.00 GiB, and the node needs at least 79.00 GiB"),
        (H100, 70, 9, "70.00 GiB of weights and 9.00 GiB of KV cache.*--kv-cache-memory to at most 8192MiB"),
        (replace(H100, free_bytes=20 * GIB, processes=(OTHER,)), 30, 0, r"process 4711 \(python, 60.00 GiB\)"),
        (replace(H100, compute_mode="Exclusive_Process", processes=(OTHER,)), 1, 0, "one process alone.*4711"),
        (replace(H100, compute_mode="Prohibited"), 1, 0, "closed to all processes.*nvidia-smi -c DEFAULT"),
    ],
)
def test_a_gpu_that_can_not_take_a_node_is_refused_with_what_would_do(
    gpu: GpuFacts, weights: int, cache: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_gpu(gpu, "cuda:0", weights * GIB, cache * GIB)


def test_a_cache_has_nine_tenths_of_what_is_left_and_of_an_equal_part_of_a_shared_gpu() -> None:
    assert room_for_cache(60, 80, 10, 10, 1) == 45
    assert room_for_cache(70, 80, 10, 10, 2) == 18  # the other may use 40
    assert room_for_cache(25, 80, 10, 10, 2) == 13  # others have taken more than their part
    assert room_for_cache(5, 80, 10, 10, 1) == 0


def test_the_drivers_program_and_file_are_read(tmp_path: Path) -> None:
    answers = {
        "--query-gpu=uuid,name,memory.total,memory.free,compute_mode": "GPU-a, NVIDIA H100, 81559, 81000, Default\n"
        "GPU-b, NVIDIA H100, 81559, 0, Exclusive_Process\nGPU-c, NVIDIA GB10, [N/A], [N/A], Default\nNo devices\n",
        "--query-compute-apps=gpu_uuid,pid,process_name,used_memory": "GPU-b, 17, a, b, 512\nGPU-b, 18, c, [N/A]\n",
    }
    found = gpus_here(answers.__getitem__)
    assert found == {
        "GPU-a": GpuFacts("NVIDIA H100", 81559 << 20, 81000 << 20),
        "GPU-b": GpuFacts(
            "NVIDIA H100",
            81559 << 20,
            0,
            "Exclusive_Process",
            [GpuProcess(17, "a, b", 512 << 20), GpuProcess(18, "c", None)],
        ),
    }
    assert gpus_here(lambda _query: "") == {}
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 12"
    )
    assert driver_version(file) == "580.65.06"
    assert driver_version(tmp_path / "none") == ""


def test_the_least_bytes_of_weights_are_known_from_their_files(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_MODELS["llama"], 0)
    files = weight_files_of(tmp_path)
    in_float32 = sum(tensor.nbytes for tensor in load_file(files[0]).values())
    assert [least_weight_bytes(files, itemsize) for itemsize in (4, 2)] == [in_float32, in_float32 // 2]


class FakeGpuMemory:
    """`GpuMemory` with these numbers. It notes how many steps it has measured."""

    def __init__(self, free: int, step: int) -> None:
        self.total, self.free, self.held = 1 << 40, free, 0
        self.step = step
        self.num_measured = 0

    def peak_of(self, run: Callable[[], object]) -> int:
        run()
        self.num_measured += 1
        if self.step > self.free:
            raise torch.OutOfMemoryError
        return self.step


@pytest.mark.parametrize(
    ("free", "step", "said"), [(1000, 2000, "too little for a step of 40 tokens"), (10, 0, "more")]
)
def test_a_gpu_without_room_for_a_step_or_blocks_is_refused(
    free: int, step: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_model, "gpu_memory", lambda _device: FakeGpuMemory(free, step))
    with pytest.raises(ConfigError, match=said):
        load_tiny(tmp_path, "llama", num_blocks=None, step_rows=40)


def test_a_models_cache_gets_what_a_gpu_has_left_beside_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FakeGpuMemory(1 << 20, 1 << 18)
    monkeypatch.setattr(cached_model, "gpu_memory", lambda _device: memory)
    runner = load_tiny(tmp_path, "llama", num_blocks=None, step_rows=40)
    room = int(0.9 * ((1 << 20) - (1 << 18)))
    assert runner.memory.num_bytes <= room < runner.memory.num_bytes + runner.layout.block_bytes
    assert memory.num_measured == 1


def test_stages_have_as_many_blocks_as_the_one_with_the_least_room() -> None:
    cache = CacheSpec(step_rows=8).with_room([1000, 3000], [10, 40], 4)
    assert cache == CacheSpec(cache_bytes=71 * 40)
    assert cache.blocks(40) == 71
    assert CacheSpec(num_blocks=5).with_room([0], [10], 4) == CacheSpec(num_blocks=5)
    with pytest.raises(ConfigError, match=r"has 100 bytes left.*needs 20 more"):
        CacheSpec(step_rows=8).with_room([100], [10], 4)
    with pytest.raises(ConfigError, match="only on a GPU"):
        CacheSpec(step_rows=8).blocks(10)
