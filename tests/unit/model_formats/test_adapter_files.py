"""An adapter's files are read as PEFT writes them; whatever is unsound in them is refused by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.errors import AdapterRefused
from baton.model_formats.adapters import AdapterFiles, open_adapter
from baton.model_formats.adapters.config import read_config
from baton.model_formats.adapters.files import is_finite
from tests.support.adapter_files import PREFIX, lora_tensors, safetensors_bytes, write_adapter

MODULES = {"model.layers.0.self_attn.q_proj": (8, 6), "model.layers.1.mlp.down_proj": (6, 10)}
Q_PROJ = "model.layers.0.self_attn.q_proj"


def written(directory: Path, **settings: Any) -> AdapterFiles:
    return open_adapter(write_adapter(directory, lora_tensors(MODULES), **settings))


def test_modules_are_those_that_the_tensors_name(tmp_path: Path) -> None:
    files = written(tmp_path)
    assert set(files.modules) == set(MODULES)
    tensors = files.modules[Q_PROJ]
    assert tensors.a is not None
    assert tensors.b is not None
    assert (tensors.a.shape, tensors.b.shape) == ((4, 6), (8, 4))
    info = files.info()
    assert (info.rank, info.num_modules, info.num_bytes) == (4, 2, 4 * 4 * (6 + 8 + 10 + 6))


def test_tensors_are_read_as_they_were_written_and_digested(tmp_path: Path) -> None:
    files = written(tmp_path)
    expected = lora_tensors(MODULES)
    found = {
        piece.place.name: np.frombuffer(piece.content, np.float32).reshape(piece.place.shape)
        for piece in files.read(files.digest())
    }
    assert set(found) == set(expected)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    with pytest.raises(AdapterRefused, match="its files have changed"):
        list(files.read("0" * 64))


def test_large_tensors_are_read_by_rows_where_that_is_wanted(tmp_path: Path) -> None:
    files = open_adapter(write_adapter(tmp_path, lora_tensors({"q_proj": (5, 1 << 18)}, rank=9), rank=9))
    name = f"{PREFIX}q_proj.lora_A.weight"
    pieces = list(files.read(files.digest(), by_rows=[name]))
    cut = [piece for piece in pieces if piece.place.name == name]
    assert [piece.first_row for piece in cut] == [0, 4, 8]
    assert len(pieces) == 4
    assert b"".join(piece.content for piece in cut) == lora_tensors({"q_proj": (5, 1 << 18)}, rank=9)[name].tobytes()


def test_the_digest_follows_weights_and_the_settings_that_change_results(tmp_path: Path) -> None:
    digest = written(tmp_path / "a").digest()
    assert written(tmp_path / "b", base_model_name_or_path="elsewhere", lora_dropout=0.5).digest() == digest
    assert written(tmp_path / "c", lora_alpha=9).digest() != digest
    assert written(tmp_path / "d", use_rslora=True).digest() != digest
    assert written(tmp_path / "e", alpha_pattern={"q_proj": 3}).digest() != digest
    other = open_adapter(write_adapter(tmp_path / "f", lora_tensors(MODULES, seed=1)))
    assert other.digest() != digest


def test_factors_follow_patterns_and_rslora(tmp_path: Path) -> None:
    write_adapter(
        tmp_path,
        lora_tensors(MODULES),
        rank_pattern={"layers.0.self_attn.q_proj": 2, r".*\.1\.mlp\.(up|down)_proj": 3},
        alpha_pattern={"down_proj": 5},
        use_rslora=True,
    )
    config = read_config(tmp_path)
    assert [config.rank_of(module) for module in MODULES] == [2, 3]
    assert [config.factor_of(module) for module in MODULES] == [8 / sqrt(2), 5 / sqrt(3)]
    assert config.rank_of("model.layers.0.self_attn.v_proj") == 4
    assert config.rank_of("model.layers.10.self_attn.q_proj") == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "only LORA is computed"),
        ({"use_dora": True}, "sets 'use_dora' to True, which Baton does not compute"),
        ({"bias": "all"}, "sets 'bias'"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"something_new": 3}, "something_new"),
        ({"r": 0}, "r must be a whole number"),
        ({"r": True}, "r must be a whole number"),
        ({"r": 5}, "which is none of the rank 5"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number"),
        ({"lora_alpha": "8"}, "lora_alpha must be a number"),
        ({"rank_pattern": {"(a+)+": 4}}, "too complex"),
        ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "pissa_niter_16"}, "sets init_lora_weights to 'pissa_niter_16'"),
        ({"init_lora_weights": "olora"}, "may change the weights of the base model"),
        ({"init_lora_weights": "OLoRA"}, "may change the weights of the base model"),
        ({"init_lora_weights": "corda"}, "may change the weights of the base model"),
        ({"init_lora_weights": "loftq"}, "may change the weights of the base model"),
        ({"init_lora_weights": "lora_ga"}, "may change the weights of the base model"),
        ({"init_lora_weights": ["pissa"]}, "may change the weights of the base model"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a number from"),
        ({"lora_alpha": 1e300}, "lora_alpha must be a number"),
        ({"lora_alpha": True}, "lora_alpha must be a number"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "alpha_pattern must be a number"),
        ({"r": 10**400}, "r must be a whole number"),
        ({"rank_pattern": {".*.*[ab]c": 4}}, "too complex"),
        ({"rank_pattern": {"(.|..)(.|..)(.|..)q": 4}}, "too complex"),
        ({"rank_pattern": {"x" * 128 + "|": 4}}, "too complex"),
        ({"rank_pattern": {f"q_proj{i}": 4 for i in range(4097)}}, "more than 4096 patterns"),
        ({"rank_pattern": {"(": 4}}, "which is none"),
        ({"rank_pattern": {f"a|{i}": 4 for i in range(65)}}, "more than 64 regular expressions"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object"),
        ({"target_modules": ["k_proj"]}, "none of its target_modules"),
        ({"target_modules": [1]}, "a list of at most 16384 names"),
        ({"use_rslora": "yes"}, "true or false"),
    ],
)
def test_settings_that_are_wrong_or_not_computed_are_refused(
    tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(AdapterRefused, match=message):
        written(tmp_path, **settings)


@pytest.mark.parametrize("initialisation", [None, True, False, "gaussian", "orthogonal", "eva"])
def test_trainings_that_leave_the_base_model_as_it_is_change_nothing(tmp_path: Path, initialisation: object) -> None:
    digest = written(tmp_path / "plain").digest()
    assert written(tmp_path / "other", init_lora_weights=initialisation).digest() == digest


@pytest.mark.parametrize("name", ["\ud800", "\x1b[2J", "a\nb", 7])
def test_names_of_base_models_that_cannot_be_shown_are_left_out(tmp_path: Path, name: object) -> None:
    assert written(tmp_path, base_model_name_or_path=name).info().base_model == ""


def test_long_names_of_modules_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterRefused, match="names of at most 128 characters"):
        open_adapter(write_adapter(tmp_path, lora_tensors({f"{'a.' * 64}q_proj": (8, 6)})))


def test_ranks_above_the_allowed_one_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    write_adapter(tmp_path, lora_tensors(MODULES))
    with pytest.raises(AdapterRefused, match="has the rank 4, and at most 3 is allowed"):
        open_adapter(tmp_path, 3)


def test_the_settings_are_bounded_json(tmp_path: Path) -> None:
    write_adapter(tmp_path, lora_tensors(MODULES))
    for content, message in (
        (b"[" * 100_000, "can't be read as JSON"),
        (b"[]", "not a JSON object"),
        (b"\xff{", "can't be read as JSON"),
        (b" " * (5 << 20), "more than"),
    ):
        (tmp_path / "adapter_config.json").write_bytes(content)
        with pytest.raises(AdapterRefused, match=message):
            open_adapter(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(AdapterRefused, match=r"has no adapter_config\.json"):
        open_adapter(tmp_path)
    with pytest.raises(AdapterRefused, match="there is no directory"):
        open_adapter(tmp_path / "nowhere")


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, lora_tensors(MODULES))
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterRefused, match="could run code"):
        open_adapter(tmp_path)


def header_of(content: bytes) -> dict[str, dict[str, list[int]]]:
    size = struct.unpack("<Q", content[:8])[0]
    found: dict[str, dict[str, list[int]]] = json.loads(content[8 : 8 + size])
    return found


def changed(change: Callable[[dict[str, dict[str, list[int]]]], object]) -> bytes:
    """The file of a sound adapter with another header."""
    content = safetensors_bytes(lora_tensors(MODULES))
    header = header_of(content)
    data = content[8 + struct.unpack("<Q", content[:8])[0] :]
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


A = f"{PREFIX}{Q_PROJ}.lora_A.weight"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "bad header"),
        (b"\xff" * 8, "bad header"),
        (safetensors_bytes(lora_tensors(MODULES))[:-1], "truncated"),
        (safetensors_bytes({}), "holds no tensors"),
        (safetensors_bytes({"stranger": np.zeros(2, np.float32)}), "none that PEFT writes"),
        (safetensors_bytes({f"{PREFIX}a.weight": np.zeros(2, np.float32)}), "neither LoRA's A or B"),
        (safetensors_bytes({A: np.zeros((4, 6), np.int64)}), "only F32, F16 and BF16"),
        (safetensors_bytes({A: np.zeros((4, 6, 1), np.float32)}), "no matrix's"),
        (safetensors_bytes({A: np.zeros((5, 6), np.float32)}), "none of the rank 4"),
        (changed(lambda header: header[A].update(shape=[1 << 62, 1 << 62])), "has the shape"),
        (changed(lambda header: header[A].update(shape=[4, 7])), "needs 112 bytes"),
        (changed(lambda header: header[A].update(shape=[4, -6])), "has the shape"),
        (changed(lambda header: header[A].update(data_offsets=[8, 104])), "begins at"),
        (changed(lambda header: header[A].pop("shape")), "described wrongly"),
    ],
)
def test_unsound_weights_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    write_adapter(tmp_path, lora_tensors(MODULES))
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(AdapterRefused, match=message):
        open_adapter(tmp_path)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, value: str) -> None:
    tensors = lora_tensors(MODULES)
    tensors[A][3, 5] = float(value)
    files = open_adapter(write_adapter(tmp_path, tensors))
    for read in (files.info, lambda: list(files.read(""))):
        with pytest.raises(AdapterRefused, match=r"lora_A\.weight has NaN or infinity"):
            read()


@pytest.mark.parametrize(("name", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_each_number_is_finite_or_not_as_torch_has_it(name: str, dtype: torch.dtype) -> None:
    upper = np.arange(1 << 16, dtype="<u2")
    bits = np.stack([np.full_like(upper, 0xFFFF), upper], axis=1) if name == "F32" else upper[:, None]
    expected = torch.frombuffer(bytearray(bits.tobytes()), dtype=dtype).isfinite()
    assert [is_finite(name, number.tobytes()) for number in bits] == expected.tolist()
    finite = bits[expected.numpy()].tobytes()
    assert is_finite(name, finite)
    assert not is_finite(name, finite + bits[~expected.numpy()][0].tobytes() + finite)


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    files = written(tmp_path)
    with files.weights_path.open("r+b") as file:
        file.truncate(files.weights_path.stat().st_size - 8)
    with pytest.raises(AdapterRefused, match="has become shorter"):
        files.digest()
