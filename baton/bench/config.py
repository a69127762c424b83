"""What benchmarks measure, as plain values with the flags by which they are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from baton.bench.arrangement import Arrangement
from baton.bench.flag import Flag
from baton.bench.workloads.spec import WorkloadSpec
from baton.models.resolve import FoundModel

if TYPE_CHECKING:
    from baton.bench.results.summary import Slo


@dataclass(frozen=True, slots=True)
class HandoffBenchConfig:
    """`baton bench handoff`."""

    model: FoundModel
    dtype: str = "auto"
    requests: Annotated[int, Flag("Number of requests; medians over them are shown.", min=1)] = 20
    prompt_tokens: Annotated[int, Flag("Length of each prompt.", min=1)] = 1024
    new_tokens: Annotated[int, Flag("Tokens to generate for each prompt.", min=4)] = 16
    max_num_batched_tokens: Annotated[int, Flag("Tokens in a chunk of a prompt.", min=64)] = 512
    threads: Annotated[int, Flag("Threads of each node, and of the single engine.", min=1)] = 1
    other_block_size: Annotated[int, Flag("Measure reads from and into KV blocks of so many tokens, too.", min=1)] = 32
    kv_cache_bytes: int = 512 << 20
    seed: int = 0


@dataclass(frozen=True, slots=True)
class RouterBenchConfig:
    """`baton bench router`."""

    model_dir: Path
    """Only its tokenizer is used."""
    streams: int = 1000
    nodes: Annotated[int, Flag("Simulated nodes.", min=2)] = 64
    front: Annotated[str, Flag("Protocol of the clients.", kind=Literal["grpc", "http"])] = "grpc"
    connections: Annotated[int, Flag("Connections that gRPC streams share.", min=1)] = 8
    tokens_per_s: Annotated[float, Flag("Tokens per second of the loads half and mixed.", min=1)] = 25_000.0
    """Half is the load at which the added latency is measured."""
    requests_per_s: Annotated[float, Flag("Requests per second of the load mixed.", min=1)] = 500.0
    """Rate at which its streams start and end."""
    rounds: Annotated[int, Flag("Rounds of each load; medians over them are shown.", min=1)] = 5
    round_s: Annotated[float, Flag("Seconds of each round.", min=0.1)] = 2.0
    pending_requests: int = 128
    """Number of open requests in the load of requests alone."""
    settle_s: float = 1.0
    """Pause before a measurement."""


@dataclass(frozen=True, slots=True)
class SchedulerBenchConfig:
    """`baton bench scheduler`."""

    prompt_tokens: Annotated[int, Flag("Length of each prompt.", min=64)] = 1024
    rounds: Annotated[int, Flag("Rounds of 32 steps; medians over them are shown.", min=1)] = 7
    waiting: int = 10_000
    waiting_running: int = 128
    """Number of requests that run while `waiting` wait."""
    admissions: int = 64


@dataclass(frozen=True, slots=True)
class OverloadConfig:
    """`baton bench overload`; times are in seconds, limits in milliseconds."""

    backend: Annotated[
        str,
        Flag(
            "Protocol of the clients.",
            "--front",
            kind=Literal["grpc", "http"],
            convert={"grpc": "baton", "http": "openai"}.__getitem__,
        ),
    ] = "baton"
    factor: Annotated[
        float,
        Flag(
            "Offered load as a multiple of the capacity. With --tenants: the flood's rate over the other tenant's.",
            min=1,
        ),
    ] = 10.0
    overload_s: Annotated[float, Flag("Seconds of the overload.", "--duration", min=20)] = 120.0
    before_s: float = 20.0
    after_s: Annotated[float, Flag("Seconds to watch after the overload.", "--after", min=10)] = 60.0
    capacity_s: float = 15.0
    input_len: int = 64
    output_len: int = 16
    max_num_seqs: int = 8
    step_ms: Annotated[float, Flag("Step time of a simulated node; a shorter one gives more capacity.", min=1)] = 40.0
    ttft_slo_ms: Annotated[
        float, Flag("Longest time to first token of a good request, milliseconds.", "--ttft", min=1)
    ] = 2000.0
    tpot_slo_ms: float = 200.0
    seed: Annotated[int, Flag("Seed of the load.", min=0)] = 0

    @property
    def run_at_once(self) -> int:
        """Requests that the decode node gets at once: those that it runs, and some more; see
        `router.placement.room`.
        """
        return self.max_num_seqs + max(2, self.max_num_seqs // 8)


@dataclass(frozen=True, slots=True)
class CompareConfig:
    """What to compare, with which load, for how long."""

    arrangements: Sequence[Arrangement]
    model: FoundModel
    dtype: str
    workload: WorkloadSpec
    """Its rate and number of requests are replaced in each run."""
    slo: Slo | None
    """None: twice the undisturbed time per output token, and `ttft_factor` times the undisturbed first token."""
    ttft_factor: Annotated[float, Flag("See --goodput.", min=1)] = 5.0
    attainment: Annotated[float, Flag("Share of requests that must keep the SLO.", min=0.01, max=1)] = 0.9
    """The share counts among all offered requests."""
    repeats: Annotated[int, Flag("Searches for each arrangement's goodput.", min=1)] = 3
    run_s: Annotated[float, Flag("Seconds of arrivals at each rate.", min=1)] = 15.0
    """Fewer if the budget is too small."""
    max_tries: Annotated[int, Flag("Rates that a search may try.", "--tries", min=2)] = 8
    budget_s: float = float("inf")
    """Seconds from the start of the first process to the end of the last."""
    min_prompts: int = 10
    """Smallest number of requests in a run, however low its rate; fewer if the budget is too small."""
    up_flags: Sequence[str] = ()
    """More flags of `baton up`, for all arrangements."""
    max_num_batched_tokens: int | None = None
    """Most tokens of a step in all arrangements; None: tuned for each arrangement (`baton.bench.compare.run`)."""
    max_sizes: int = 4
    """Number of sizes that are tried for one arrangement."""
    tune_tries: int = 5
    """Rates that are tried for one size."""
    is_baseline_tuned_alone: bool = False
    """Tune colocated nodes only; the others get the default, to their disadvantage if it is not their best."""


@dataclass(frozen=True, slots=True)
class ValidateConfig:
    """What to validate with one model."""

    name: str
    model: FoundModel
    dtype: str
    workload: WorkloadSpec
    """Its rate and number of requests are replaced in each segment."""
    arrangement: Arrangement
    loads: Sequence[float]
    """Rates as shares of the capacity, which is measured with a closed loop."""
    run_s: Annotated[float, Flag("Largest number of seconds of arrivals at each load.", min=1)] = 90.0
    """Arrivals last so long if there is time for it."""
    up_flags: Sequence[str] = ()
    rounds: Annotated[int, Flag("Short runs of each load, interleaved with the others.", min=1)] = 3
    threads_per_node: int = 1
    """Threads of each node, at least one for each of its ranks, and cores that it is pinned to."""
