"""GGUF containers: what is read, and that every malformed file is refused with one line."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.model_formats.gguf.container import BLOCK_FORMATS, open_gguf
from tests.support.gguf_files import random_blocks, write_gguf

METADATA = {
    "a.bool": True,
    "a.int": 7,
    "a.float": 0.5,
    "a.text": "Grüße",
    "a.list": ["x", "yy", ""],
    "a.numbers": [1, 2, 3],
    "a.floats": [0.5, -1.0],
}
TENSORS: Mapping[str, tuple[str, npt.NDArray[Any]]] = {
    "blk.0.attn_q.weight": ("Q4_K", random_blocks("Q4_K", 2, 512, seed=1)),
    "output_norm.weight": ("F32", np.arange(5, dtype=np.float32)),
}
BIG_BYTES = 1 << 20


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", TENSORS, METADATA)


def test_metadata_and_tensors_are_what_was_written(sound: Path) -> None:
    with open_gguf(sound) as file:
        assert file.metadata["general.architecture"] == "llama"
        numbers, floats = file.metadata["a.numbers"], file.metadata["a.floats"]
        plain = {key: file.metadata[key] for key in METADATA if key not in ("a.numbers", "a.floats")}
        assert plain == {key: METADATA[key] for key in plain}
        assert (list(numbers), list(floats)) == ([1, 2, 3], [0.5, -1.0])  # type: ignore[arg-type]
        place = file.tensors["blk.0.attn_q.weight"]
        assert (place.shape, place.format.name) == ((2, 512), "Q4_K")
        assert bytes(file.bytes_of(place)) == TENSORS["blk.0.attn_q.weight"][1].tobytes()
        norm = file.tensors["output_norm.weight"]
        assert np.frombuffer(file.bytes_of(norm), dtype=np.float32).tolist() == [0, 1, 2, 3, 4]


def test_every_type_of_number_keeps_its_value(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "types.gguf", "llama")
    bounds = {
        "uint8": 2**8 - 1,
        "int8": -(2**7),
        "uint16": 2**16 - 1,
        "int16": -(2**15),
        "uint32": 2**32 - 1,
        "int32": -(2**31),
        "uint64": 2**64 - 1,
        "int64": -(2**63),
        "float64": 1e300,
    }
    for kind, value in bounds.items():
        getattr(writer, f"add_{kind}")(f"a.{kind}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(tmp_path / "types.gguf") as file:
        assert {kind: file.metadata[f"a.{kind}"] for kind in bounds} == bounds


def test_sizes_of_formats_are_those_of_llama_cpp() -> None:
    theirs = {kind: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)] for kind in BLOCK_FORMATS}
    assert theirs == {kind: (found.num_elements, found.num_bytes) for kind, found in BLOCK_FORMATS.items()}
    assert all(gguf.GGMLQuantizationType(kind).name == found.name for kind, found in BLOCK_FORMATS.items())


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def header(num_tensors: int, num_keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def tensor(name: str, dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return (
        string(name)
        + struct.pack("<I", len(dims))
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", kind, offset)
    )


def key(name: str, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


PADDING = bytes(4096)
ARRAY, UINT32, STRING = 9, 4, 8


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "cannot mmap an empty file"),
        (b"GGML" + PADDING, "does not begin with GGUF"),
        (b"GGUF", "header ends before byte 8"),
        (header(0, 0, version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(2**40, 0), "tensors are more than"),
        (header(0, 2**63), "keys are more than"),
        (header(1000, 0), "tensors are more than"),
        (header(0, 1) + key("a", 13, b"") + PADDING, "type 13 of a value is unknown"),
        (header(0, 1) + struct.pack("<Q", 2**62) + PADDING, "bytes of a string are more"),
        (header(0, 1) + key("a", STRING, struct.pack("<Q", 2) + b"\xff\xfe"), "not UTF-8"),
        (header(0, 1) + key("a", ARRAY, struct.pack("<IQ", STRING, 2**32)) + PADDING, "elements of an array are more"),
        (header(0, 1) + key("a", ARRAY, struct.pack("<IQ", UINT32, 2**61)) + PADDING, "elements of an array are more"),
        (header(0, 1) + key("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 8) + PADDING, "nested more than"),
        (header(0, 1) + key("a", ARRAY, struct.pack("<IQ", ARRAY, 5000)) + bytes(100_000), "more than 4096"),
        (header(0, 2) + key("a", UINT32, bytes(4)) * 2 + PADDING, "'a' is there twice"),
        (header(0, 1) + key("general.alignment", UINT32, struct.pack("<I", 33)) + PADDING, "power of two"),
        (header(0, 1) + key("general.alignment", UINT32, bytes(4)) + PADDING, "power of two"),
        (header(1, 0) + tensor("../weights") + PADDING, "'../weights' is not a name"),
        (header(1, 0) + tensor("a..b") + PADDING, "'a..b' is not a name"),
        (header(1, 0) + tensor("a/b") + PADDING, "'a/b' is not a name"),
        (header(1, 0) + tensor("") + PADDING, "'' is not a name"),
        (header(1, 0) + tensor("w", dims=()) + PADDING, "0 dimensions"),
        (header(1, 0) + tensor("w", dims=(1, 1, 1, 1, 1)) + PADDING, "5 dimensions"),
        (header(1, 0) + tensor("w", dims=(32, 0)) + PADDING, "can't have the shape (0, 32)"),
        (header(1, 0) + tensor("w", dims=(2**40, 2**40)) + PADDING, "can't have the shape"),
        (header(1, 0) + tensor("w", dims=(31,), kind=2) + PADDING, "of format Q4_0 can't have the shape (31,)"),
        (header(1, 0) + tensor("w", kind=10) + PADDING, "format Q2_K, which is not read"),
        (header(1, 0) + tensor("w", kind=16) + PADDING, "format IQ2_XXS, which is not read"),
        (header(1, 0) + tensor("w", kind=777) + PADDING, "format 777, which is not read"),
        (header(1, 0) + tensor("w", offset=4) + PADDING, "not a multiple of 32"),
        (header(1, 0) + tensor("w", offset=2**40) + PADDING, "copy it again"),
        (header(1, 0) + tensor("w", dims=(4096,)) + PADDING, "copy it again"),
        (header(2, 0) + tensor("v") + tensor("w", offset=96) + PADDING, "tensor w overlaps"),
        (header(2, 0) + tensor("w") + tensor("w", offset=128) + PADDING, "w is there twice"),
    ],
)
def test_a_malformed_file_is_refused_with_its_path_and_the_reason(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught, open_gguf(path):
        pass
    assert complaint in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_errors_of_the_reader_of_a_file_are_not_taken_for_errors_of_the_file(sound: Path) -> None:
    with pytest.raises(ValueError, match="mine"), open_gguf(sound):
        raise ValueError("mine")


@st.composite
def mutations(draw: st.DrawFn) -> tuple[int | None, list[tuple[int, bytes]]]:
    """Where a file is cut, and which bytes are overwritten at which places (as a share of 2 ** 16 of its length)."""
    cut = draw(st.none() | st.integers(0, 2**16))
    patch = st.binary(min_size=1, max_size=8) | st.integers(0, 2**64 - 1).map(lambda value: struct.pack("<Q", value))
    return cut, draw(st.lists(st.tuples(st.integers(0, 2**16), patch), max_size=4))


@settings(max_examples=400, deadline=None)
@given(change=mutations())
def test_a_changed_or_cut_file_is_read_or_refused_and_takes_no_memory(
    tmp_path_factory: pytest.TempPathFactory, sound: Path, change: tuple[int | None, list[tuple[int, bytes]]]
) -> None:
    content = bytearray(sound.read_bytes())
    cut, patches = change
    for share, patch in patches:
        start = share * len(content) >> 16
        content[start : start + len(patch)] = patch
    if cut is not None:
        del content[cut * len(content) >> 16 :]
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with suppress(ConfigError), open_gguf(path) as file:
            for place in file.tensors.values():
                assert len(file.bytes_of(place)) == place.num_bytes
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < BIG_BYTES
