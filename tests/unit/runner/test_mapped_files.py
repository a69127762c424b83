"""Which pages of memory MappedFiles drops."""

import ctypes
import mmap
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from baton.runner.model.stored.mapped_files import MappedFiles

_ELEMENTS = 1 << 20


def test_memory_that_took_the_place_of_a_mapping_keeps_its_content(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(_ELEMENTS)}, path)
    # This mapping stands for that of another thread, which loads the same checkpoint.
    theirs = safe_open(path, framework="pt")
    weight: torch.Tensor = theirs.get_tensor("weight")  # type: ignore[no-untyped-call]
    address = weight.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    mapped = MappedFiles([path])
    del weight, theirs
    ours = _memory_at(address, 4 * _ELEMENTS)
    ours.fill_(1)
    module = nn.Linear(1, 1, bias=False)
    module.weight = nn.Parameter(ours, requires_grad=False)

    mapped.release(module)

    assert bool((ours == 1).all())
    module.weight = nn.Parameter(torch.zeros(1))
    del ours
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(4 * _ELEMENTS))


def _memory_at(address: int, num_bytes: int) -> torch.Tensor:
    """Anonymous memory at this address, where nothing is mapped."""
    fixed_without_replacing = 0x100000
    map_memory = ctypes.CDLL(None, use_errno=True).mmap
    map_memory.restype = ctypes.c_void_p
    got = map_memory(
        ctypes.c_void_p(address),
        ctypes.c_size_t(num_bytes),
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed_without_replacing,
        -1,
        ctypes.c_long(0),
    )
    assert got == address
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.float32)
