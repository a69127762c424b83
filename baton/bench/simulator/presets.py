"""Simulations of published experiments, with published coefficients where there are any."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from baton.bench.arrangement import Arrangement
from baton.bench.results.slo import Slo
from baton.bench.simulator.plan import SimulationPlan
from baton.bench.simulator.shapes import RankFigures
from baton.bench.simulator.simulation import NodeSizes, SimulationConfig
from baton.bench.simulator.step_times import FormulaTimes
from baton.bench.workloads.spec import WorkloadSpec

PRESETS = ("distserve", "mooncake", "fleet")


def preset(name: str, trace: Path | None, seed: int) -> SimulationPlan:
    """Makes the plan of a name in PRESETS; raises KeyError for other names."""
    plans = {"distserve": distserve, "fleet": fleet}
    return mooncake(trace, seed) if name == "mooncake" else plans[name](seed)


def distserve(seed: int = 0) -> SimulationPlan:
    """DistServe's chatbot on OPT-13B (Zhong et al., OSDI 2024, table 1 and figure 8), with every split of four A100.

    The GPUs are linked by NVLink with 300 GB/s in each direction; 26 of 80 GB are weights.
    """
    return SimulationPlan(
        WorkloadSpec(dataset="sharegpt-like", num_prompts=2000, seed=seed),
        SimulationConfig(Arrangement(0, 4), NodeSizes(max_model_len=2048), nic_bytes_per_s=300e9, seed=seed),
        Arrangement.splits(4),
        slo=Slo(250, 100),
        finds_goodput=True,
    )


LLAMA2_70B_ON_8_A800 = FormulaTimes(
    prefill_ms=30.0,
    prefill_token_ms=0.112,
    prefill_square_ms=1.05e-6,
    decode_ms=20.0,
    decode_context_ms=2.0e-5,
    decode_sequence_ms=0.05,
)
"""Our estimate: half of 8 x 312 TFLOPS for 140 GFLOP per token and 1.3 MFLOP per squared token in attention; a step
reads 140 GB of weights at 7 TB/s, and 328 kB of keys and values for each token at 16 TB/s."""


def mooncake(trace: Path | None, seed: int = 0) -> SimulationPlan:
    """Mooncake's conversation trace on 8 prefill and 8 decode nodes, with its policies (FAST 2025, figure 8)."""
    sizes = NodeSizes(
        times=LLAMA2_70B_ON_8_A800,
        block_size=512,
        cache_tokens=3_000_000,
        kv_bytes_per_token=327_680,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
    )
    arrangement = Arrangement(8, 8)
    return SimulationPlan(
        WorkloadSpec(dataset="mooncake", dataset_path=str(trace or ""), time_scale=MOONCAKE_SPEED, seed=seed),
        SimulationConfig(arrangement, sizes, nic_bytes_per_s=100e9, seed=seed),
        [arrangement],
        ("random", "load-balanced", "local-cache", "global-cache"),
        ranks=RankFigures(weight_bytes=140e9),
    )


MOONCAKE_SPEED = 1.4
"""Speed at which the trace is replayed. Prefill nodes are then about as busy as in the paper, judged by the queueing
time with random placement: the paper does not give their utilisation."""


def fleet(seed: int = 0) -> SimulationPlan:
    """A million requests on 512 nodes, to measure the simulator itself. Two routers have half of the nodes each."""
    sizes = replace(NodeSizes(), block_size=64)
    arrangement = Arrangement(256, 256)
    workload = WorkloadSpec(
        dataset="random",
        num_prompts=1_000_000,
        request_rate=1500,
        random_input_len=512,
        random_output_len=128,
        random_range_ratio=0.5,
        seed=seed,
    )
    config = SimulationConfig(arrangement, sizes, choices=8, cells=2, seed=seed)
    return SimulationPlan(workload, config, [arrangement], ("cost",))
