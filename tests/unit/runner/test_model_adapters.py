"""Adapters that don't fit a model are refused by name before memory is taken, and change nothing for other requests."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from baton.errors import AdapterRefused
from baton.model_formats.adapters import open_adapter, read_adapter
from baton.runner.adapters.in_parts import AdaptersInParts, HostedAdapters
from baton.runner.adapters.model_adapters import ModelAdapters
from baton.runner.model.random_model import write_random_model
from baton.runner.model.stored.plan import CheckpointNames
from baton.runner.model_runner import TorchModelRunner
from tests.doubles.fake_adapter_files import FakeAdapterFiles
from tests.support.adapter_files import PREFIX, lora_tensors, write_adapter
from tests.support.adapter_runs import GREEDY, PROMPT, load_adapter, outputs
from tests.support.load_with import load_with
from tests.support.runner_driver import RunnerDriver
from tests.support.tiny_models import TINY_MODELS

Q_PROJ = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    write_random_model(directory, TINY_MODELS["llama"], seed=5)
    return directory


@pytest.fixture
def runner(base: Path) -> TorchModelRunner:
    return load_with(base, dtype="float32", num_blocks=64)


def of_q_proj(seed: int = 0, **how: Any) -> dict[str, Any]:
    return dict(lora_tensors({Q_PROJ: (64, 64)}, seed=seed, **how))


def written(directory: Path, count: int) -> list[Path]:
    """Directories of so many adapters."""
    return [write_adapter(directory / f"{seed}", of_q_proj(seed)) for seed in range(count)]


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"model.layers.0.self_attn.w_proj": (64, 64)}, r"w_proj, which is no product of this model"),
        (
            {"model.layers.3.self_attn.q_proj": (64, 64)},
            r"layers\.3\.self_attn\.q_proj, and this model has no such layer",
        ),
        (
            {"model.layers.0.self_attn.q_proj": (64, 32)},
            r"q_proj\.lora_A\.weight has the shape \[4, 32\].*needs \[4, 64\]",
        ),
        (
            {"model.layers.0.mlp.up_proj": (64, 64)},
            r"up_proj\.lora_B\.weight has the shape \[64, 4\].*needs \[128, 4\]",
        ),
        ({"model.layers.0.mlp.experts": (64, 64)}, r"which is no product"),
        ({"model.layers.0.mlp.experts.0.up_proj": (64, 64)}, r"which is no product"),
        ({"model.layers.0.input_layernorm": (64, 64)}, r"which is no product"),
        ({"": (64, 64)}, r"which is no product"),
    ],
)
def test_adapters_of_another_model_are_refused_before_they_are_read(
    runner: TorchModelRunner, tmp_path: Path, modules: dict[str, tuple[int, int]], message: str
) -> None:
    write_adapter(tmp_path, lora_tensors(modules))
    with pytest.raises(AdapterRefused, match=message):
        runner.adapters.load(tmp_path, "not even compared")
    assert not runner._transformer.adapters.slots


def test_patterns_are_tried_for_modules_of_the_model_alone(runner: TorchModelRunner, tmp_path: Path) -> None:
    write_adapter(tmp_path, lora_tensors({"stranger": (64, 64)}), rank_pattern={"stranger": 3})
    with pytest.raises(AdapterRefused, match="changes stranger, which is no product"):
        runner.adapters.check(tmp_path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(runner: TorchModelRunner, tmp_path: Path, bad: float) -> None:
    before = outputs(runner, "")
    sound = load_adapter(runner, write_adapter(tmp_path / "sound", of_q_proj()))
    with_sound = outputs(runner, sound)
    tensors = of_q_proj(seed=1)
    tensors[f"{PREFIX}{Q_PROJ}.lora_B.weight"][63, 3] = bad
    with pytest.raises(AdapterRefused, match=r"q_proj\.lora_B\.weight has NaN or infinity"):
        load_adapter(runner, write_adapter(tmp_path / "broken", tensors))
    assert list(runner._transformer.adapters.slots) == [sound]
    assert outputs(runner, "", sound) == [*before, *with_sound]


def test_numbers_that_overflow_fail_their_own_request_alone(runner: TorchModelRunner, tmp_path: Path) -> None:
    before = outputs(runner, "")
    huge = load_adapter(runner, write_adapter(tmp_path, of_q_proj(scale=1e30)))
    driver = RunnerDriver(runner)
    driver.add("huge", PROMPT, GREEDY, adapter=huge)
    driver.add("without", PROMPT, GREEDY)
    driver.finish()
    assert driver.requests["huge"].failed
    assert driver.requests["without"].output == before[0]


def test_replaced_modules_are_refused(runner: TorchModelRunner, tmp_path: Path) -> None:
    tensors = of_q_proj()
    tensors[f"{PREFIX}lm_head.weight"] = np.zeros((256, 64), np.float32)
    write_adapter(tmp_path, tensors, target_modules=["q_proj"], modules_to_save=["lm_head"])
    with pytest.raises(AdapterRefused, match="replaces the module lm_head"):
        load_adapter(runner, tmp_path)


def test_a_base_weight_beside_the_adapter_must_be_that_of_the_model(runner: TorchModelRunner, tmp_path: Path) -> None:
    name = "model.embed_tokens"
    tensors: dict[str, Any] = {
        f"{PREFIX}{name}.lora_embedding_A": np.ones((4, 256), np.float32),
        f"{PREFIX}{name}.lora_embedding_B": np.ones((64, 4), np.float32),
        f"{PREFIX}{name}.base_layer.weight": np.zeros((256, 64), np.float32),
    }
    with pytest.raises(AdapterRefused, match="this model's is another one"):
        load_adapter(runner, write_adapter(tmp_path / "other", tensors, target_modules=["embed_tokens"]))
    own = runner._transformer._module.get_input_embeddings().weight
    tensors[f"{PREFIX}{name}.base_layer.weight"] = own.numpy()
    digest = load_adapter(runner, write_adapter(tmp_path / "same", tensors, target_modules=["embed_tokens"]))
    assert outputs(runner, digest) != outputs(runner, "")


def test_base_weights_of_other_modules_are_refused_before_they_are_read(
    runner: TorchModelRunner, tmp_path: Path
) -> None:
    tensors = of_q_proj()
    tensors[f"{PREFIX}{Q_PROJ}.base_layer.weight"] = np.full((64, 64), 0, np.float32)
    with pytest.raises(AdapterRefused, match="compared for the embedding and the head alone"):
        load_adapter(runner, write_adapter(tmp_path, tensors, target_modules=["q_proj"]))


def test_a_head_beside_the_adapter_is_compared_bit_by_bit(base: Path, runner: TorchModelRunner, tmp_path: Path) -> None:
    own = load_file(base / "model.safetensors")["lm_head.weight"].float().numpy().copy()
    tensors: dict[str, Any] = lora_tensors({"lm_head": (256, 64)})
    tensors[f"{PREFIX}lm_head.base_layer.weight"] = own
    load_adapter(runner, write_adapter(tmp_path / "same", tensors, target_modules=["lm_head"]))
    own[255, 63] += 1
    with pytest.raises(AdapterRefused, match="this model's is another one"):
        load_adapter(runner, write_adapter(tmp_path / "other", tensors, target_modules=["lm_head"]))


def test_a_file_that_does_not_come_holds_up_no_step_and_no_other_adapter(
    runner: TorchModelRunner, tmp_path: Path
) -> None:
    directories = written(tmp_path, 3)
    digests = [open_adapter(directory).digest() for directory in directories]
    held = FakeAdapterFiles.of(directories[2])
    transformer = runner._transformer
    own = ModelAdapters(
        transformer._module,
        transformer._operations,
        transformer.dtype,
        transformer.row_quantum,
        transformer.device,
        CheckpointNames,
        lambda directory: held if directory == directories[2] else read_adapter(directory),
    )
    adapters = HostedAdapters(own, AdaptersInParts(own), 8)
    adapters.load(directories[0], digests[0])
    with ThreadPoolExecutor(3) as pool:
        loads = [pool.submit(adapters.load, directories[2], digests[2]) for _ in range(2)]
        held.is_read.wait()
        try:
            pool.submit(adapters.unload, digests[0]).result(10)
            pool.submit(adapters.load, directories[1], digests[1]).result(10)
        finally:
            held.answers.set()
        for load_of_held in loads:
            load_of_held.result()
    assert own.slots == {digests[1]: 0, digests[2]: 1}


def test_rows_of_an_adapter_that_was_just_unloaded_do_no_harm(runner: TorchModelRunner, tmp_path: Path) -> None:
    digests = [load_adapter(runner, directory) for directory in written(tmp_path, 2)]
    adapters = runner._transformer.adapters
    adapters.begin(np.array([1, 0], np.int32))
    runner.adapters.unload(digests[1])
    step = adapters.of_step()
    assert step is not None
    assert all(len(of_product) == 2 for of_product in step.table)


def test_the_memory_of_an_unloaded_adapter_is_free_at_once(runner: TorchModelRunner, tmp_path: Path) -> None:
    digest = load_adapter(runner, write_adapter(tmp_path, of_q_proj()))
    outputs(runner, digest)
    kept = [
        weakref.ref(packed)
        for of_product in runner._transformer.adapters.rows.table.products
        for of_slot in of_product
        for part in of_slot or ()
        if part is not None
        for packed in part.kept
        if isinstance(packed, torch.Tensor)
    ]
    assert any(one() is not None for one in kept)
    runner.adapters.unload(digest)
    gc.collect()
    assert all(one() is None for one in kept)


def test_a_module_without_a_or_b_stays_as_it_is(runner: TorchModelRunner, tmp_path: Path) -> None:
    whole = of_q_proj()
    half = lora_tensors({"model.layers.0.mlp.up_proj": (128, 64)})
    del half[f"{PREFIX}model.layers.0.mlp.up_proj.lora_B.weight"]
    one = load_adapter(runner, write_adapter(tmp_path / "one", whole))
    more = load_adapter(runner, write_adapter(tmp_path / "more", whole | half))
    assert outputs(runner, one) == outputs(runner, more) != outputs(runner, "")
    with pytest.raises(AdapterRefused, match="changes no module"):
        load_adapter(runner, write_adapter(tmp_path / "none", half))


def test_slots_are_used_again_and_running_requests_keep_theirs(runner: TorchModelRunner, tmp_path: Path) -> None:
    digests = [load_adapter(runner, directory) for directory in written(tmp_path, 3)]
    expected = {digest: outputs(runner, digest) for digest in digests}
    runner.adapters.unload(digests[1])
    runner.adapters.unload(digests[1])
    assert outputs(runner, digests[2], digests[0]) == [*expected[digests[2]], *expected[digests[0]]]
    again = load_adapter(runner, tmp_path / "1")
    assert runner._transformer.adapters.slots[again] == 1
    assert outputs(runner, *digests) == [one for digest in digests for one in expected[digest]]


def test_adapters_are_loaded_from_other_threads_while_steps_run(runner: TorchModelRunner, tmp_path: Path) -> None:
    first, *others = written(tmp_path, 9)
    digests = [load_adapter(runner, first)]
    expected = outputs(runner, "", digests[0])
    threads = [threading.Thread(target=lambda one=one: digests.append(load_adapter(runner, one))) for one in others]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert outputs(runner, "", digests[0]) == expected
    assert set(digests) == set(runner._transformer.adapters.slots)
