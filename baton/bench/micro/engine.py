"""`baton bench engine`: measures the engine, and compares it with the limits of the machine.

One engine with its scheduler runs in this process. The machine's limits are measured right before and after each
measurement that is compared with them. `floor` is the time to read a decode step's weights, keys and values once at
memory bandwidth; `share` is floor divided by step (1 is the optimum). A second engine computes products with torch on
unpadded rows, which shows the cost of the bit-exact rule. Both engines are measured in turn, so that drift of the
machine's speed affects both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from baton.bench.micro.engine_drive import EngineDrive, load_with_room
from baton.bench.micro.engine_work import ModelWork, attention_operations, cache_bytes_read, read_work
from baton.bench.results.host import available_memory, last_level_cache, processor
from baton.bench.results.spread import Spread
from baton.engine.runner import KVLayout, LayerGeometry, ModelInfo
from baton.errors import ConfigError
from baton.runner import TorchSpec
from baton.runner.model.checkpoint import open_checkpoint
from baton.text.model_files import read_model_files

if TYPE_CHECKING:
    from baton.runner.backends.timed_operations import StepSplit
    from baton.runner.measuring.attention_limit import AttentionTimes
    from baton.runner.measuring.limits import ProductShape
    from baton.runner.measuring.profile import TimedRunner

_BATCHES = (1, 8, 16)
_ROUNDS = 6
BLOCK_SIZE = 16
_WIDTHS = {"float32": 4, "bfloat16": 2}
_MEMORY_MARGIN = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineBenchConfig:
    """What to measure."""

    model_dir: Path
    name: str = ""
    dtype: str = "auto"
    cache_dtype: str = "auto"
    quantization: Literal["int8", "int4"] | None = None
    dequantize: bool = False
    context_tokens: int = 1024
    steps: int = 48
    """Decode steps at each batch size, in six rounds."""
    threads: int = 1
    seed: int = 0
    batches: Sequence[int] = _BATCHES
    """Numbers of requests that decode together."""
    alone: bool = False
    """Without the second engine, which computes the products with torch."""
    read_bytes: int | None = None
    """Bytes of the read that measures memory. Default: more than the processor's caches hold."""

    def spec(self) -> TorchSpec:
        """The engine, without the number of its blocks."""
        return TorchSpec(
            self.model_dir,
            self.dtype,
            block_size=BLOCK_SIZE,
            cache_dtype=self.cache_dtype,
            num_threads=self.threads,
            name=self.name,
            quantization=self.quantization,
            dequantize=self.dequantize,
        )


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """One batch size; medians over the steps."""

    batch: int
    tokens_per_s: float
    step_ms: float
    step_ms_p10: float
    step_ms_p90: float
    floor_ms: float
    """Time to read weights, and keys and values of every context, once at memory bandwidth; median over the rounds."""
    share: float
    """Floor divided by step, computed for each round; median over the rounds."""

    @property
    def step_by_floor(self) -> float:
        return 1 / self.share


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """The parts of a step's time; medians over steps of one kind, for each part separately."""

    step: str
    """`prefill`, or `decode` and the batch size."""
    attention_ms: float
    products_ms: float
    elementwise_ms: float
    """Norms, rotary embeddings, and activations that are separate operations."""
    sampling_ms: float
    """Time from the last product to the tokens."""
    python_ms: float
    """The rest: scheduler, Python, other functions of torch."""


@dataclass(frozen=True, slots=True)
class BitExactCost:
    """Share of throughput that the bit-exact engine loses against the other one; 0 if it is faster."""

    prefill: float
    decode: dict[str, float]
    """By batch size."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Medians, some with the tenth and ninetieth percentile."""

    model: str
    dtype: str
    threads: int
    processor: str
    kernels: str
    weight_bytes: int
    """Size of all weights in memory."""
    cache_dtype: str
    bit_exact: bool
    context_tokens: int
    read_gb_per_s: float
    read_gb_per_s_p10: float
    read_gb_per_s_p90: float
    read_way: str
    product_gflop_per_s: float
    product_gflop_per_s_p10: float
    product_gflop_per_s_p90: float
    product_way: str
    prefill_ms: float
    prefill_ms_p10: float
    prefill_ms_p90: float
    prefill_tokens_per_s: float
    prefill_share_of_product_rate: float
    """Rate of products with weights, as a share of the machine's product rate; attention is not counted."""
    prefill_share_with_attention: float
    """The same with the products of attention."""
    decode: Sequence[DecodeFigures]
    attention_paged_ms: float
    """One layer, 16 requests x 1024 tokens, 32/8 heads of 64; keys and values are in no cache of the processor."""
    attention_gathered_ms: float
    attention_speedup: float
    attention_apart_ms: float
    """The same as `attention_paged_ms`, with 16 tokens more of each request."""
    attention_shared_ms: float
    """The same, where all requests share the first 1024 tokens."""
    attention_shared_ratio: float
    """The median of the ratios of the two, measured by turns."""
    bit_exact_cost: float | None
    """The largest of `bit_exact_cost_by`."""
    bit_exact_cost_by: BitExactCost | None
    bit_exact_cost_unknown_because: str
    """Why there was no second engine to compare with; empty: there was one."""
    time_split: Sequence[TimeSplit]


@dataclass(frozen=True, slots=True)
class _Limits:
    """How the machine's limits were reached."""

    read: str
    product: str
    attention: AttentionTimes


@dataclass(frozen=True, slots=True)
class Measurement:
    """One engine's prompt, or its steps of one round, with the better of the limit's rates before and after it."""

    seconds: Sequence[float]
    rate: float


class BesideLimit:
    """Measures pieces of work one right after the other, and the rate of a limit between them."""

    def __init__(self, rate_now: Callable[[], float]) -> None:
        self._rate_now = rate_now
        self._rate = rate_now()

    def measure(self, work: Callable[[], Sequence[float]]) -> Measurement:
        """The seconds that the work returns, with the better of the rates right before and after it."""
        before, seconds = self._rate, work()
        self._rate = self._rate_now()
        return Measurement(seconds, max(before, self._rate))


@dataclass(slots=True)
class _Figures:
    """The measurements of one engine: one for each prompt, and one for each round by batch size."""

    drive: EngineDrive
    prefill: list[Measurement] = field(default_factory=list)
    decode: dict[int, list[Measurement]] = field(default_factory=dict)

    @property
    def prefill_seconds(self) -> list[float]:
        return [turn.seconds[0] for turn in self.prefill]

    def decode_seconds(self, batch: int) -> list[float]:
        return [seconds for turn in self.decode[batch] for seconds in turn.seconds]


def run(config: EngineBenchConfig) -> EngineReport:
    """Runs the benchmark; raises ConfigError for a configuration that can't be measured."""
    from baton.runner.backends.kernel_choice import choose_operations
    from baton.runner.measuring.attention_limit import attention_times
    from baton.runner.measuring.limits import bytes_beyond, product_limit, read_limit
    from baton.runner.measuring.profile import load_timed

    if config.steps < _ROUNDS:
        raise ConfigError(f"--steps must be at least {_ROUNDS}")
    work = read_work(config.model_dir)
    max_tokens = read_model_files(config.model_dir).max_model_len
    if config.context_tokens + config.steps + 2 > max_tokens:
        raise ConfigError(f"the model takes at most {max_tokens} tokens; use smaller --context-tokens or --steps")
    spec = config.spec()
    ours = load_with_room(
        lambda num_blocks: load_timed(replace(spec, num_blocks=num_blocks)), partial(num_stripes, config)
    )
    spec = replace(spec, num_blocks=ours.memory.num_blocks)
    info = ours.model
    why_alone = "it was not asked for" if config.alone else _why_alone(work, info, ours.memory.num_bytes)
    theirs = None if why_alone else load_timed(spec, bit_exact=False)
    operations = choose_operations(config.threads)
    attention = attention_times(info.dtype, config.threads, operations, last_level_cache())
    rng = Random(config.seed)
    prompts = [
        [rng.randrange(info.vocab_size) for _ in range(config.context_tokens)] for _ in range(max(config.batches))
    ]
    both = [
        _Figures(EngineDrive(runner, config.context_tokens, max(config.batches))) for runner in (ours, theirs) if runner
    ]
    products = product_limit(_product_shapes(config, work), info.dtype, config.threads, operations)
    beside = BesideLimit(products.rate)
    for index, prompt in enumerate(prompts):
        for engine in both:
            measured = beside.measure(partial(_prefill, engine.drive, prompt))
            if index:  # the first prompt warms up
                engine.prefill.append(measured)
    steps = config.steps // _ROUNDS
    with read_limit(config.threads, config.read_bytes or bytes_beyond(last_level_cache())) as memory:
        beside = BesideLimit(memory.rate)
        for batch in [*config.batches] * _ROUNDS:
            for engine in both:
                measured = beside.measure(partial(engine.drive.decode, prompts[:batch], steps))
                engine.decode.setdefault(batch, []).append(measured)
    splits = [_prefill_split(both[0].drive, ours, config, rng)]
    splits += [_decode_split(both[0].drive, ours, batch, prompts, config) for batch in config.batches]
    limits = _Limits(memory.way, products.way, attention)
    return _report(config, work, info, limits, ours.layout, both, splits, why_alone)


def _why_alone(work: ModelWork, info: ModelInfo, cache_bytes: int) -> str:
    """Why no second engine is measured beside this one; empty: one is."""
    plain_bytes = (work.multiplied + work.looked_up) * _WIDTHS[info.dtype]
    if info.weight_bytes < plain_bytes:
        return "torch has no products with packed weights"
    if available_memory() <= 2 * plain_bytes + cache_bytes + _MEMORY_MARGIN:
        return "there is not enough memory for a second engine"
    return ""


def num_stripes(config: EngineBenchConfig, block_size: int) -> int:
    """So many blocks of each group of layers keep all prompts and outputs in the prefix cache.

    Of blocks with many tokens, which have large states, those of a few rounds' outputs are enough.
    """
    prompts = (max(config.batches) + _ROUNDS) * -(-config.context_tokens // block_size)
    rounds = _ROUNDS + 1 if block_size == BLOCK_SIZE else 2
    generated = sum(config.batches) * rounds * (config.steps // _ROUNDS // block_size + 2)
    return (prompts + generated) * 9 // 8


def _product_shapes(config: EngineBenchConfig, work: ModelWork) -> list[ProductShape]:
    from baton.runner.measuring.limits import ProductShape

    own = {ProductShape(config.context_tokens, k, n) for n, k in work.shapes if n * k < 1 << 26}
    usual = {ProductShape(config.context_tokens, k, n) for n, k in ((8192, 2048), (4096, 4096), (2048, 8192))}
    return sorted(own | usual, key=lambda shape: shape.operations)


def _prefill(drive: EngineDrive, prompt: Sequence[int]) -> Sequence[float]:
    return [drive.prefill(prompt)]


def _prefill_split(drive: EngineDrive, timed: TimedRunner, config: EngineBenchConfig, rng: Random) -> TimeSplit:
    timed.timing = True
    vocabulary = timed.model.vocab_size
    prompts = [[rng.randrange(vocabulary) for _ in range(config.context_tokens)] for _ in range(_ROUNDS)]
    steps, splits = [], []
    for prompt in prompts:
        steps.append(drive.prefill(prompt))
        splits.append(timed.split())
    timed.timing = False
    return _split("prefill", steps, splits)


def _decode_split(
    drive: EngineDrive, timed: TimedRunner, batch: int, prompts: Sequence[Sequence[int]], config: EngineBenchConfig
) -> TimeSplit:
    timed.timing = True
    splits: list[StepSplit] = []
    steps = drive.decode(prompts[:batch], config.steps // _ROUNDS, lambda: splits.append(timed.split()))
    timed.timing = False
    return _split(f"decode {batch}", steps, splits)


def _split(name: str, steps: Sequence[float], splits: Sequence[StepSplit]) -> TimeSplit:
    parts = [(split.attention, split.products, split.elementwise, split.sampling) for split in splits]
    rest = [whole - sum(part) for whole, part in zip(steps, parts, strict=True)]
    attention, products, elementwise, sampling = (median(column) * 1e3 for column in zip(*parts, strict=True))
    return TimeSplit(name, attention, products, elementwise, sampling, median(rest) * 1e3)


def _report(
    config: EngineBenchConfig,
    work: ModelWork,
    info: ModelInfo,
    limits: _Limits,
    layout: KVLayout,
    both: Sequence[_Figures],
    splits: Sequence[TimeSplit],
    why_alone: str,
) -> EngineReport:
    ours = both[0]
    prefill = Spread.of(ours.prefill_seconds, 1e3)
    products = work.prompt_operations(config.context_tokens)
    attention = _attention_operations(config, layout)
    share = median(products / (turn.rate * turn.seconds[0]) for turn in ours.prefill)
    reads = Spread.of([turn.rate for turns in ours.decode.values() for turn in turns], 1e-9)
    rates = Spread.of([turn.rate for turn in ours.prefill], 1e-9)
    cost = _bit_exact_cost(ours, both[1]) if len(both) > 1 else None
    return EngineReport(
        model=info.name,
        dtype=info.dtype,
        threads=config.threads,
        processor=processor(),
        kernels=info.numerics,
        weight_bytes=info.weight_bytes,
        cache_dtype=layout.dtype,
        bit_exact=info.bit_exact,
        context_tokens=config.context_tokens,
        read_gb_per_s=reads.median,
        read_gb_per_s_p10=reads.p10,
        read_gb_per_s_p90=reads.p90,
        read_way=limits.read,
        product_gflop_per_s=rates.median,
        product_gflop_per_s_p10=rates.p10,
        product_gflop_per_s_p90=rates.p90,
        product_way=limits.product,
        prefill_ms=prefill.median,
        prefill_ms_p10=prefill.p10,
        prefill_ms_p90=prefill.p90,
        prefill_tokens_per_s=config.context_tokens / prefill.median * 1e3,
        prefill_share_of_product_rate=share,
        prefill_share_with_attention=share * (products + attention) / products,
        decode=[_decode(config, work, info, layout, ours, batch) for batch in config.batches],
        attention_paged_ms=limits.attention.paged * 1e3,
        attention_gathered_ms=limits.attention.gathered * 1e3,
        attention_speedup=limits.attention.gathered / limits.attention.paged,
        attention_apart_ms=limits.attention.apart * 1e3,
        attention_shared_ms=limits.attention.shared * 1e3,
        attention_shared_ratio=limits.attention.shared_ratio,
        bit_exact_cost=max(cost.prefill, *cost.decode.values()) if cost else None,
        bit_exact_cost_by=cost,
        bit_exact_cost_unknown_because=why_alone,
        time_split=splits,
    )


def _decode(
    config: EngineBenchConfig,
    work: ModelWork,
    info: ModelInfo,
    layout: KVLayout,
    figures: _Figures,
    batch: int,
) -> DecodeFigures:
    step = Spread.of(figures.decode_seconds(batch), 1e3)
    # A round starts one token after the prompt, and the context grows by one token per step.
    context = config.context_tokens + 2 + (config.steps // _ROUNDS - 1) / 2
    width = (info.weight_bytes - info.table_bytes) / work.multiplied
    num_bytes = work.bytes_read(width, cache_bytes_read(layout, context), batch)
    floors = [num_bytes / turn.rate for turn in figures.decode[batch]]
    shares = [floor / median(turn.seconds) for floor, turn in zip(floors, figures.decode[batch], strict=True)]
    return DecodeFigures(
        batch, batch / step.median * 1e3, step.median, step.p10, step.p90, median(floors) * 1e3, median(shares)
    )


def _attention_operations(config: EngineBenchConfig, layout: KVLayout) -> float:
    values: dict[str, Any] = dict(open_checkpoint(config.model_dir).config)
    heads = values.get("num_attention_heads") or values.get("n_head") or 1
    numbers = sum(layer.key_dim + layer.value_dim for layer in layout.layers if isinstance(layer, LayerGeometry))
    return attention_operations(config.context_tokens, numbers * heads)


def _bit_exact_cost(ours: _Figures, theirs: _Figures) -> BitExactCost:
    return BitExactCost(
        prefill=_share_lost(ours.prefill_seconds, theirs.prefill_seconds),
        decode={
            str(batch): _share_lost(ours.decode_seconds(batch), theirs.decode_seconds(batch)) for batch in ours.decode
        },
    )


def _share_lost(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Share of throughput lost, compared pair by pair, so that drift of the machine's speed cancels out."""
    return max(0.0, 1 - median(other / own for own, other in zip(ours, theirs, strict=True)))
