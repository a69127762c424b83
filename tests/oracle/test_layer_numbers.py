"""Models whose layers have numbers of their own (gemma4_text): bits of the sequence alone, divided among ranks, with
adapters and quantised; in stages, if these may be where they are asked for. Their tokens are compared in test_types.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from baton.engine.request import Request
from baton.engine.runner import LayerGeometry
from baton.errors import ConfigError
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.model_formats.adapters import open_adapter
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.spec import TorchSpec
from tests.oracle.test_adapters_bit_exact import WithoutPrograms
from tests.oracle.test_bit_exact import AMONG_OTHERS, Run, assert_continued_alike, assert_interruptions_change_no_bit
from tests.oracle.test_ranks_exact import ALONE, Shape, compute, loaded
from tests.oracle.test_token_exact import BLOCK_SIZE, NEW_TOKENS, make_engine, run_all
from tests.support.layer_number_models import GEMMA4_MODELS
from tests.support.peft_adapters import generate_with_peft, write_peft_adapter
from tests.support.varied_models import write_varied_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
PROMPTS = {f"prompt-{length}": Random(length).choices(range(256), k=length) for length in (1, 5, 16, 33, 70, 150)}
"""Shorter and longer than the windows, and in several chunks."""
LENGTH = 300


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def written(models: Path, name: str) -> Path:
    if not (models / name).exists():
        write_varied_model(models / name, GEMMA4_MODELS[name], seed=5)
    return models / name


@pytest.mark.parametrize("name", GEMMA4_MODELS)
def test_the_layout_has_the_numbers_of_each_layer(models: Path, name: str) -> None:
    runner = load_runner(TorchSpec(written(models, name), dtype="float32", num_blocks=16))
    globally = {"mixture": (1, 32), "shared": (2, 32), "dense": (1, 512)}
    heads = {(layer.num_kv_heads, layer.key_dim) for layer in runner.layout.layers if isinstance(layer, LayerGeometry)}
    assert heads == {(2, 16), globally[name]}
    assert len(runner.layout.layers) == (3 if name == "shared" else 4), "layers without keys of their own have none"


@pytest.mark.parametrize("name", GEMMA4_MODELS)
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", None), ("bfloat16", None), ("float32", "int4"), ("bfloat16", "int8")]
)
def test_bits_depend_on_the_sequence_alone(models: Path, name: str, dtype: str, quantization: str | None) -> None:
    def run_on(num_threads: int) -> Run:
        spec = TorchSpec(
            written(models, name),
            dtype=dtype,
            num_blocks=400,
            num_threads=num_threads,
            quantization=quantization,  # type: ignore[arg-type]
        )
        runner = load_runner(spec)
        assert runner.model.bit_exact, runner.model.bit_exact_reason
        return Run(runner._transformer, runner.model.vocab_size)

    run = run_on(1)
    expected = run.compute(run.state("main"), [LENGTH])
    assert run.compute(run.state("main"), AMONG_OTHERS, run.mates(6)).equals(expected), "among others"
    cached, tail = assert_interruptions_change_no_bit(run, expected)
    if quantization is None:
        assert_continued_alike(run, run_on(2), cached, tail)


def test_single_calls_have_the_tokens_of_programs(models: Path) -> None:
    spec = TorchSpec(written(models, "shared"), dtype="bfloat16", block_size=BLOCK_SIZE, num_blocks=96)
    runners = (load_runner(spec), load_runner(spec, operations=WithoutPrograms()))
    assert [runner._transformer.why_no_programs == "" for runner in runners] == [True, False]
    answers = [
        run_all(make_engine(runner), [Request(name, RequestSpec(prompt, GREEDY)) for name, prompt in PROMPTS.items()])
        for runner in runners
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [("mixture", "float32", (2, 1)), ("shared", "bfloat16", (2, 1)), ("dense", "float32", (2, 2))],
)
def test_ranks_give_the_bits_of_one_process(models: Path, name: str, dtype: str, shape: Shape) -> None:
    sampling = SamplingParams(temperature=0.9, seed=3, max_tokens=NEW_TOKENS)
    runs = []
    for ranks in (ALONE, shape):
        with loaded(written(models, name), ranks, dtype=dtype) as runner:
            runs.append(compute(runner, sampling))
    runs[1].check_equal(runs[0])


def test_layers_that_share_keys_stay_together(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    why = "5 layers, of which the last 4 must be together, can't be divided among 3 stages; at most 2 would do"
    with pytest.raises(ConfigError, match=why), loaded(written(models, "shared"), (1, 3), dtype="float32"):
        pass
    # The division then is that of a model whose configuration doesn't say that layers share keys.
    monkeypatch.setattr("baton.runner.model.stage._num_inseparable", lambda _config: 1)
    why = "layers of Gemma4ForCausalLM need keys, values or other results of layers that are in another stage"
    with pytest.raises(ConfigError, match=why), loaded(written(models, "shared"), (1, 2), dtype="float32"):
        pass


def test_heads_of_every_layer_must_be_divisible(tmp_path: Path) -> None:
    config = {**GEMMA4_MODELS["dense"], "num_attention_heads": 6, "num_key_value_heads": 2}
    write_random_model(tmp_path, {**config, "num_global_key_value_heads": 3}, seed=5)
    with (
        pytest.raises(ConfigError, match=r"6 attention heads over 3 key/value heads can't be divided among 2 ranks"),
        loaded(tmp_path, (2, 1), dtype="float32"),
    ):
        pass


@pytest.mark.parametrize("name", ["shared", "dense"])
def test_tokens_with_an_adapter_equal_those_of_peft(models: Path, tmp_path: Path, name: str) -> None:
    base = written(models, name)
    write_peft_adapter(base, tmp_path, seed=1, r=4, lora_alpha=8, target_modules="all-linear")
    runner = load_runner(TorchSpec(base, dtype="float32", block_size=BLOCK_SIZE, num_blocks=96))
    digest = open_adapter(tmp_path).digest()
    runner.adapters.load(tmp_path, digest)
    expected = generate_with_peft(base, tmp_path, PROMPTS, NEW_TOKENS)
    assert expected != generate_with_peft(base, None, PROMPTS, NEW_TOKENS)
    requests = [Request(key, RequestSpec(prompt, GREEDY, adapter=digest)) for key, prompt in PROMPTS.items()]
    assert run_all(make_engine(runner), requests) == expected


@pytest.mark.parametrize(
    ("field", "number"),
    [("global_head_dim", -32), ("num_global_key_value_heads", 0), ("vocab_size_per_layer_input", 0)],
)
def test_a_wrong_number_of_some_layers_is_refused(tmp_path: Path, field: str, number: int) -> None:
    config = {**GEMMA4_MODELS["shared"], "attention_k_eq_v": True, "num_global_key_value_heads": 2}
    write_random_model(tmp_path, config, seed=5)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    # Released checkpoints lack it; transformers writes what it makes of these numbers.
    del written["per_layer_config"]
    path.write_text(json.dumps({**written, **config, field: number}))
    with pytest.raises(ConfigError, match=f"{tmp_path.name} has {field} {number} in its config.json"):
        load_runner(TorchSpec(tmp_path, dtype="float32", num_blocks=16))


def test_a_wrong_number_of_one_layer_is_refused(tmp_path: Path) -> None:
    write_random_model(tmp_path, GEMMA4_MODELS["dense"], seed=5)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    written["per_layer_config"]["3"]["head_dim"] = -32
    path.write_text(json.dumps(written))
    with pytest.raises(ConfigError, match=f"{tmp_path.name} has head_dim -32 in its config.json"):
        load_runner(TorchSpec(tmp_path, dtype="float32", num_blocks=16))


def test_a_table_of_embeddings_that_lacks_tokens_is_refused(tmp_path: Path) -> None:
    write_random_model(tmp_path, {**GEMMA4_MODELS["shared"], "vocab_size_per_layer_input": 255}, seed=5)
    with pytest.raises(ConfigError, match=r"IndexError"):
        load_runner(TorchSpec(tmp_path, dtype="float32", num_blocks=16))
