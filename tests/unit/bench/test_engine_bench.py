"""The engine benchmark: how work is counted, how an engine is driven, how its time is split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from baton.bench.micro.adapters import measure as measure_adapters
from baton.bench.micro.engine import BesideLimit, EngineBenchConfig, Measurement, run
from baton.bench.micro.engine_drive import EngineDrive, load_with_room
from baton.bench.micro.engine_work import attention_operations, cache_bytes_read, read_work, work_of
from baton.bench.results.host import available_memory, last_level_cache, processor
from baton.bench.results.spread import Spread
from baton.cli.bench.micro import print_engine
from baton.cli.main import main
from baton.engine.runner import STATE_WINDOW, KVLayout, LayerGeometry, LayerGroup, LayerState
from baton.errors import BatonError
from baton.runner import SimulatedSpec, TorchSpec, load
from baton.runner.backends.cpu.kernels.product import Activation
from baton.runner.backends.timed_operations import StepSplit, TimedOperations
from baton.runner.measuring.limits import UnpaddedOperations
from baton.runner.measuring.profile import load_timed
from baton.runner.model.random_model import write_random_model
from tests.doubles.fake_runner import FakeRunner
from tests.support import reference_operations as reference
from tests.support.quantized_models import FP8_FORMATS, PACKED_FORMATS, write_quantized_model
from tests.support.tiny_models import TINY_MODELS

PROMPTS = [list(range(start, start + 32)) for start in (1, 50, 99)]


def test_the_work_of_a_dense_model() -> None:
    shapes = {"model.embed_tokens.weight": (100, 8), "model.q.weight": (4, 8), "model.norm.weight": (8,)}
    tied = work_of({"vocab_size": 100}, shapes)
    assert (tied.dense, tied.head, tied.experts) == (32 + 8, 800, 0)
    own_head = work_of({"vocab_size": 100}, {**shapes, "lm_head.weight": (100, 8)})
    assert (own_head.dense, own_head.head) == (40, 800), "a table that is only looked up is not read"
    assert own_head.shapes == {(4, 8), (100, 8)}
    assert tied.bytes_read(2, cache_bytes=50, batch=3) == 840 * 2 + 150
    assert tied.prompt_operations(7) == 2 * (7 * 40 + 800)


def test_only_experts_that_rows_are_routed_to_are_read() -> None:
    work = work_of({"num_experts": 4, "num_experts_per_tok": 1}, {"mlp.experts.up": (4, 6, 5)})
    assert (work.experts, work.num_experts) == (120, 4)
    assert work.bytes_read(1, 0, batch=1) == 30
    assert work.bytes_read(1, 0, batch=2) == 30 + 30 * 3 / 4
    assert work.prompt_operations(10) == 2 * 10 * 30
    by_expert = {f"mlp.experts.{index}.up.weight": (6, 5) for index in range(4)}
    for config in ({"num_local_experts": 4, "num_experts_per_tok": 2}, {"moe_num_experts": 4, "moe_k": 2}):
        assert work_of(config, by_expert).prompt_operations(10) == 2 * 10 * 60


def test_a_convolution_of_each_column_is_no_expert() -> None:
    work = work_of({}, {"model.layers.0.conv.weight": (6, 1, 4)})
    assert (work.dense, work.experts, work.shapes) == (24, 0, frozenset())


def test_a_step_reads_all_keys_those_in_windows_and_states_whatever_the_context() -> None:
    geometry, state = LayerGeometry(2, 8, 8), LayerState(rows=2, width=8)
    groups = (LayerGroup((0,)), LayerGroup((1,), window=6), LayerGroup((2,), window=STATE_WINDOW))
    layout = KVLayout(4, (geometry, geometry, state), "bfloat16", groups)
    assert cache_bytes_read(layout, 10) == 64 * (10 + 6) + 64
    assert cache_bytes_read(layout, 3) == 64 * (3 + 3) + 64


def test_the_work_of_a_model_directory_counts_all_its_weights(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_MODELS["llama"], 0)
    work = read_work(tmp_path)
    hidden, inner, vocab = 64, 128, 256
    layer = hidden * (hidden + 2 * hidden // 2 + hidden) + 3 * hidden * inner + 2 * hidden
    assert work.dense == 3 * layer + hidden
    assert work.head == hidden * vocab


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("form", ["gptq-int4", "ct-int8-rows", "fp8-block"])
def test_the_work_of_a_quantised_model_is_that_of_the_plain_one(tmp_path: Path, architecture: str, form: str) -> None:
    plain = write_quantized_model(tmp_path / "quantised", architecture, {**PACKED_FORMATS, **FP8_FORMATS}[form])
    assert read_work(tmp_path / "quantised") == read_work(plain)
    assert read_work(plain).multiplied > 0


def test_a_table_that_is_only_looked_up_is_counted_apart() -> None:
    shapes = {"model.embed_tokens.weight": (100, 8), "model.q.weight": (4, 8)}
    assert work_of({"vocab_size": 100}, shapes).looked_up == 0
    assert work_of({"vocab_size": 100}, {**shapes, "lm_head.weight": (100, 8)}).looked_up == 800


def test_weights_that_layers_share_count_for_each_of_them_and_products_that_undo_embeddings_are_none() -> None:
    shapes = {
        "model.layers.0.shared.up.weight": (6, 8),
        "model.layers.0.shared.up_adapter_list.0.weight": (2, 8),
        "model.layers.0.shared.up_adapter_list.1.weight": (2, 8),
        "model.unembed_projections.0.weight": (8, 8),
        "model.embed_tokens.weight": (100, 8),
    }
    further = {name.replace("layers.0", "layers.3"): shape for name, shape in shapes.items() if "layers.0" in name}
    work = work_of({"vocab_size": 100}, shapes, {**further, "lm_head.weight": (100, 8)})
    assert (work.dense, work.repeated, work.head, work.looked_up) == (48 + 2 * 16 + 64, 48, 800, 0)
    assert work.bytes_read(1, 0, batch=1) == work.dense + 48 + 800
    assert work.prompt_operations(7) == 2 * (7 * (work.dense + 48) + 800)


def test_layers_without_keys_of_their_own_compute_the_last_token_alone() -> None:
    layers = {f"model.layers.{index}.mlp.up_proj.weight": (6, 8) for index in range(3)}
    tables = {"model.embed_tokens.weight": (100, 8), "model.embed_tokens_per_layer.weight": (100, 12)}
    config = {"vocab_size": 100, "hidden_size": 8, "num_hidden_layers": 3, "num_kv_shared_layers": 2}
    work = work_of(config, layers | tables)
    assert (work.dense, work.head, work.looked_up) == (3 * 48, 800, 1200)
    assert work.prompt_operations(7) == 2 * (7 * 48 + 2 * 48 + 800)
    assert work.bytes_read(1, 0, batch=1) == 3 * 48 + 800


def test_attention_is_counted_over_the_keys_that_a_query_attends_to() -> None:
    # Token 1 sees 1 key, token 2 sees 2, token 3 sees 3: 6 pairs, each a product with a key and one with a value.
    assert attention_operations(3, width=10) == 6 * 10 * 2


def test_spread_is_median_and_tenth_and_ninetieth_percentile() -> None:
    assert Spread.of([5.0]) == Spread(5.0, 5.0, 5.0)
    assert Spread.of([4, 1, 3, 2, 5, 6, 7, 8, 9, 10, 11], 2.0) == Spread(12.0, 4.0, 20.0)


def test_hardware_is_read_from_linux(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:    2048 kB\n")
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: A Processor\n")
    for index, size in enumerate(("48K", "2048K", "32M")):
        (tmp_path / f"cache/index{index}").mkdir(parents=True)
        (tmp_path / f"cache/index{index}/size").write_text(size + "\n")
    assert available_memory(tmp_path / "meminfo") == 2 << 20
    assert processor(tmp_path / "cpuinfo") == "A Processor"
    assert last_level_cache(tmp_path) == 32 << 20
    missing = tmp_path / "nothing"
    assert (available_memory(missing), processor(missing), last_level_cache(missing)) == (0, "", 0)


def test_a_drive_computes_prompts_and_decodes_them_as_one_batch() -> None:
    runner = load(SimulatedSpec(num_blocks=64, block_size=4))
    drive = EngineDrive(runner, prompt_tokens=32, max_batch=3)
    assert all(drive.prefill(prompt) > 0 for prompt in PROMPTS)
    seen = []
    assert len(drive.decode(PROMPTS, 5, lambda: seen.append(1))) == len(seen) == 5
    assert len(drive.decode(PROMPTS[:1], 3)) == 3


def test_the_engine_is_measured_and_compared_with_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random_model(tmp_path, TINY_MODELS["llama"], seed=1)
    # A real read takes a gigabyte, a hundred times.
    report = run(EngineBenchConfig(tmp_path, "tiny", context_tokens=32, steps=6, read_bytes=1 << 24))
    assert (report.threads, report.context_tokens, report.bit_exact) == (1, 32, True)
    assert 0 < report.attention_shared_ms < report.attention_apart_ms
    for key in ("prefill_tokens_per_s", "prefill_share_of_product_rate", "attention_speedup", "read_gb_per_s"):
        assert getattr(report, key) > 0, key
    assert [figures.batch for figures in report.decode] == [1, 8, 16]
    for figures in report.decode:
        assert figures.tokens_per_s > 0
        assert figures.share > 0
        assert figures.step_ms_p10 <= figures.step_ms <= figures.step_ms_p90
    assert report.read_gb_per_s_p10 <= report.read_gb_per_s <= report.read_gb_per_s_p90
    assert report.bit_exact_cost is not None
    assert 0 <= report.bit_exact_cost < 1
    assert [split.step for split in report.time_split] == ["prefill", "decode 1", "decode 8", "decode 16"]
    assert all(split.products_ms > 0 and split.python_ms > 0 for split in report.time_split)
    print_engine(report)
    assert f"memory    {report.read_gb_per_s:.1f} GB/s" in capsys.readouterr().out


def test_adapters_are_measured_by_turns(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_MODELS["qwen2"], 0)
    config = EngineBenchConfig(tmp_path, dtype="float32", context_tokens=20, steps=6)
    figures = measure_adapters(config, num_adapters=2, rank=3)
    assert [one.step for one in figures] == ["prefill, 1 adapter", "decode 2, 1 adapter", "decode 2, 2 adapters"]
    assert all(min(one.tokens_per_s, one.plain_tokens_per_s, one.ratio) > 0 for one in figures)


def test_a_drive_refuses_requests_that_do_not_fit_into_the_cache_together() -> None:
    drive = EngineDrive(load(SimulatedSpec(num_blocks=12, block_size=4)), prompt_tokens=32, max_batch=3)
    with pytest.raises(BatonError, match="too few blocks for all of them"):
        drive.decode(PROMPTS, 2)


@pytest.mark.parametrize(("windows", "room"), [((None,), 20), ((None, 8, 8), 60)])
def test_a_cache_has_room_for_all_groups_of_layers(windows: tuple[int | None, ...], room: int) -> None:
    asked, ended = [], []

    class Runner(FakeRunner):
        def close(self) -> None:
            ended.append(self.memory.num_blocks)

    def load_one(num_blocks: int) -> Runner:
        asked.append(num_blocks)
        return Runner(num_blocks, 4, windows=windows)

    assert load_with_room(load_one, lambda block_size: 5 * block_size).memory.num_blocks == room
    assert asked[1:] == [room]
    assert ended == asked[:1]


def test_timed_operations_change_no_result_and_split_the_time(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_MODELS["qwen2"], 0)
    spec = TorchSpec(tmp_path, "float32", num_blocks=32)
    plain, timed = load(spec), load_timed(spec)
    assert (timed.model, timed.layout) == (plain.model, plain.layout)
    drive = EngineDrive(timed, prompt_tokens=32, max_batch=3)
    drive.prefill(PROMPTS[0])
    assert timed.split().products == 0, "nothing is timed before timing is turned on"
    timed.timing = True
    splits: list[StepSplit] = []
    steps = drive.decode(PROMPTS[:1], 4, lambda: splits.append(timed.split()))
    assert timed.split() == splits[-1], "the step that drops the ended request measures nothing"
    for step, split in zip(steps, splits, strict=True):
        parts = (split.attention, split.products, split.elementwise, split.sampling)
        assert min(split.attention, split.products, split.sampling) > 0
        assert sum(parts) < step


def test_a_timed_runner_is_the_one_that_was_specified(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_MODELS["qwen2"], 0)
    for changes in ({"cache_dtype": "int8"}, {"quantization": "int4"}):
        spec = replace(TorchSpec(tmp_path, num_blocks=32), **changes)  # type: ignore[arg-type]
        plain, timed = load(spec), load_timed(spec)
        assert (timed.model, timed.layout) == (plain.model, plain.layout)


def test_timed_operations_pass_other_calls_on() -> None:
    watch = TimedOperations(reference)
    watch.timing = True
    weight = watch.pack(torch.eye(4))
    x = torch.arange(8.0).view(2, 4)
    assert torch.equal(watch.linear(x, weight), x)
    assert watch.numerics() == reference.numerics()
    with pytest.raises(AttributeError):
        watch.no_such_operation()


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_unpadded_products_equal_torchs(activation: Activation) -> None:
    operations = UnpaddedOperations(reference)
    generator = torch.Generator().manual_seed(0)
    gate, up, x = (torch.randn(rows, 16, generator=generator) for rows in (8, 8, 3))
    packed = operations.pack(gate, up)
    assert torch.equal(operations.linear(x, packed), functional.linear(x, torch.cat([gate, up])))
    assert torch.equal(operations.take_rows(packed, torch.tensor([9, 0])), torch.stack([up[1], gate[0]]))
    got = operations.gated_linear(x, operations.pack_gated(gate, up), activation=activation)
    torch.testing.assert_close(
        got, reference.gated_linear(x, reference.pack_gated(gate, up), activation=activation), atol=1e-4, rtol=1e-4
    )
    assert operations.rms_norm(x, torch.ones(16), 1e-6).shape == x.shape, "what is no product is the inner one's"


def test_a_model_without_the_bit_exact_rule_can_be_loaded(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_MODELS["llama"], 0)
    spec = TorchSpec(tmp_path, "float32", num_blocks=32)
    free = load_timed(spec, bit_exact=False)
    assert free.model.numerics.startswith("unpadded-torch")
    EngineDrive(free, prompt_tokens=32, max_batch=3).prefill(PROMPTS[0])


def test_work_is_compared_with_the_better_of_the_rates_right_before_and_after_it() -> None:
    beside = BesideLimit(iter([5.0, 3.0, 4.0, 1.0]).__next__)
    assert [beside.measure(lambda: [0.5]) for _ in range(3)] == [Measurement([0.5], rate) for rate in (5.0, 4.0, 4.0)]


@pytest.mark.parametrize(
    ("options", "exit_code", "says"),
    [
        (("--model", "tiny", "--shape", "0.5b"), 2, "exclude each other"),
        (("--model", "tiny", "--context-tokens", "100000"), 78, "use smaller --context-tokens or --steps"),
        (("--shape", "7t"), 78, "'7t' is unknown"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    options: Sequence[str],
    exit_code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_random_model(tmp_path / "tiny", TINY_MODELS["llama"], 0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the command sets it for its own process
    assert main(["bench", "engine", *options]) == exit_code
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith("baton: ")
    assert says in printed.err
