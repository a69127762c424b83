"""Adapters that don't fit a model are refused by name before memory is taken, and change nothing for other requests."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.errors import AdapterRefused
from baton.messages.sampling import SamplingParams
from baton.model_formats.adapters import open_adapter
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from tests.support.adapter_files import PREFIX, lora_tensors, write_adapter
from tests.support.runner_driver import RunnerDriver
from tests.support.tiny_models import TINY_MODELS

Q_PROJ = "model.layers.1.self_attn.q_proj"
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    write_random_model(directory, TINY_MODELS["llama"], seed=5)
    return directory


def runner_of(base: Path) -> TorchModelRunner:
    return load_runner(base, dtype="float32", num_blocks=64)


def tokens(runner: TorchModelRunner, *adapters: str) -> list[list[int]]:
    driver = RunnerDriver(runner)
    for index, adapter in enumerate(adapters):
        driver.add(f"{index}", PROMPT, GREEDY, adapter=adapter)
    driver.finish(chunk=3)
    return [request.output for request in driver.requests.values()]


def load(runner: TorchModelRunner, directory: Path) -> str:
    digest = open_adapter(directory).digest()
    runner.load_adapter(directory, digest)
    return digest


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
        ({"model.layers.0.mlp.experts": (64, 64)}, r"which are experts"),
        ({"model.layers.0.input_layernorm": (64, 64)}, r"which is no product"),
        ({"": (64, 64)}, r"which is no product"),
    ],
)
def test_adapters_of_another_model_are_refused_before_they_are_read(
    base: Path, tmp_path: Path, modules: dict[str, tuple[int, int]], message: str
) -> None:
    runner = runner_of(base)
    write_adapter(tmp_path, lora_tensors(modules))
    with pytest.raises(AdapterRefused, match=message):
        runner.load_adapter(tmp_path, "not even compared")
    assert not runner._transformer.adapters.slots


def test_patterns_are_tried_for_modules_of_the_model_alone(base: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path, lora_tensors({"stranger": (64, 64)}), rank_pattern={"stranger": 3})
    with pytest.raises(AdapterRefused, match="changes stranger, which is no product"):
        load_runner(base, dtype="float32", num_blocks=64).check_adapter(tmp_path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(base: Path, tmp_path: Path, bad: float) -> None:
    runner = runner_of(base)
    before = tokens(runner, "")
    sound = load(runner, write_adapter(tmp_path / "sound", lora_tensors({Q_PROJ: (64, 64)})))
    with_sound = tokens(runner, sound)
    tensors = lora_tensors({Q_PROJ: (64, 64)}, seed=1)
    tensors[f"{PREFIX}{Q_PROJ}.lora_B.weight"][63, 3] = bad
    with pytest.raises(AdapterRefused, match=r"q_proj\.lora_B\.weight has NaN or infinity"):
        load(runner, write_adapter(tmp_path / "broken", tensors))
    assert list(runner._transformer.adapters.slots) == [sound]
    assert tokens(runner, "", sound) == [*before, *with_sound]


def test_numbers_that_overflow_fail_their_own_request_alone(base: Path, tmp_path: Path) -> None:
    runner = runner_of(base)
    before = tokens(runner, "")
    huge = load(runner, write_adapter(tmp_path, lora_tensors({Q_PROJ: (64, 64)}, scale=1e30)))
    driver = RunnerDriver(runner)
    driver.add("huge", PROMPT, GREEDY, adapter=huge)
    driver.add("without", PROMPT, GREEDY)
    driver.finish()
    assert driver.requests["huge"].failed
    assert driver.requests["without"].output == before[0]


def test_replaced_modules_are_refused(base: Path, tmp_path: Path) -> None:
    tensors: dict[str, Any] = lora_tensors({Q_PROJ: (64, 64)})
    tensors[f"{PREFIX}lm_head.weight"] = np.zeros((256, 64), np.float32)
    write_adapter(tmp_path, tensors, target_modules=["q_proj"], modules_to_save=["lm_head"])
    with pytest.raises(AdapterRefused, match="replaces the module lm_head"):
        load(runner_of(base), tmp_path)


def test_a_base_weight_beside_the_adapter_must_be_that_of_the_model(base: Path, tmp_path: Path) -> None:
    runner = runner_of(base)
    name = "model.embed_tokens"
    tensors: dict[str, Any] = {
        f"{PREFIX}{name}.lora_embedding_A": np.ones((4, 256), np.float32),
        f"{PREFIX}{name}.lora_embedding_B": np.ones((64, 4), np.float32),
        f"{PREFIX}{name}.base_layer.weight": np.zeros((256, 64), np.float32),
    }
    with pytest.raises(AdapterRefused, match="this model's is another one"):
        load(runner, write_adapter(tmp_path / "other", tensors, target_modules=["embed_tokens"]))
    own = runner._transformer._module.get_input_embeddings().weight
    tensors[f"{PREFIX}{name}.base_layer.weight"] = own.numpy()
    digest = load(runner, write_adapter(tmp_path / "same", tensors, target_modules=["embed_tokens"]))
    assert tokens(runner, digest) != tokens(runner, "")


def test_a_module_without_a_or_b_stays_as_it_is(base: Path, tmp_path: Path) -> None:
    runner = runner_of(base)
    whole = lora_tensors({Q_PROJ: (64, 64)})
    half = lora_tensors({"model.layers.0.mlp.up_proj": (128, 64)})
    del half[f"{PREFIX}model.layers.0.mlp.up_proj.lora_B.weight"]
    one = load(runner, write_adapter(tmp_path / "one", whole))
    more = load(runner, write_adapter(tmp_path / "more", whole | half))
    assert tokens(runner, one) == tokens(runner, more) != tokens(runner, "")
    with pytest.raises(AdapterRefused, match="changes no module"):
        load(runner, write_adapter(tmp_path / "none", half))


def test_slots_are_used_again_and_running_requests_keep_theirs(base: Path, tmp_path: Path) -> None:
    runner = runner_of(base)
    digests = [
        load(runner, write_adapter(tmp_path / f"{seed}", lora_tensors({Q_PROJ: (64, 64)}, seed=seed)))
        for seed in range(3)
    ]
    expected = {digest: tokens(runner, digest) for digest in digests}
    runner.unload_adapter(digests[1])
    runner.unload_adapter(digests[1])
    assert tokens(runner, digests[2], digests[0]) == [*expected[digests[2]], *expected[digests[0]]]
    again = load(runner, tmp_path / "1")
    assert runner._transformer.adapters.slots[again] == 1
    assert tokens(runner, *digests) == [one for digest in digests for one in expected[digest]]


def test_adapters_are_loaded_from_other_threads_while_steps_run(base: Path, tmp_path: Path) -> None:
    runner = runner_of(base)
    first = load(runner, write_adapter(tmp_path / "first", lora_tensors({Q_PROJ: (64, 64)})))
    expected = tokens(runner, "", first)
    directories = [
        write_adapter(tmp_path / f"{seed}", lora_tensors({Q_PROJ: (64, 64)}, seed=seed)) for seed in range(1, 9)
    ]
    digests: list[str] = []
    threads = [threading.Thread(target=lambda one=one: digests.append(load(runner, one))) for one in directories]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert tokens(runner, "", first) == expected
    assert set(digests) | {first} == set(runner._transformer.adapters.slots)
