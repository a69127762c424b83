"""A workload as plain values that fit a command line and a JSON object, so that every process can build it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from baton.bench.workloads.synthetic import MultiTurn, RandomLengths, SharedPrefixes, sharegpt_like
from baton.bench.workloads.trace import AZURE, MOONCAKE, Trace, TraceScale
from baton.bench.workloads.workload import (
    Arrivals,
    GammaArrivals,
    Lengths,
    RampArrivals,
    SteadyArrivals,
    Synthetic,
    UnpacedArrivals,
    Workload,
)
from baton.errors import InvalidRequest

DATASETS = ("random", "sharegpt-like", "prefix_repetition", "multi_turn", "mooncake", "azure")
_TRACES = {"mooncake": MOONCAKE, "azure": AZURE}


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """The workload flags of `baton bench` commands; names are those of vLLM's flags where vLLM has them."""

    dataset: str = "random"
    dataset_path: str = ""
    num_prompts: int | None = None
    """None: 1,000, or the whole trace."""
    request_rate: float = float("inf")
    burstiness: float = 1.0
    """Shape of the gaps' gamma distribution; infinity: equal gaps."""
    ramp_up_strategy: str = ""
    """linear, exponential, or empty."""
    ramp_up_start_rps: float = 0.0
    ramp_up_end_rps: float = 0.0
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    num_prefixes: int = 10
    prefix_len: int = 256
    suffix_len: int = 256
    turns: int = 4
    turn_len: int = 128
    think_s: float = 0.0
    time_scale: float = 1.0
    length_scale: float = 1.0
    output_scale: float = 1.0
    max_input_len: int | None = None
    max_output_len: int | None = None
    skip_broken_lines: bool = False
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """The values as strict JSON: infinity becomes `inf`."""
        values = asdict(self)
        return {name: "inf" if value == float("inf") else value for name, value in values.items()}

    @staticmethod
    def from_json(values: dict[str, Any]) -> WorkloadSpec:
        """The inverse of `to_json`; fields that this version does not know are left out."""
        known = {field.name for field in fields(WorkloadSpec)}
        fitting: dict[str, Any] = {
            name: float("inf") if value == "inf" else value for name, value in values.items() if name in known
        }
        return WorkloadSpec(**fitting)

    def build(self) -> Workload:
        """Makes the workload; raises InvalidRequest."""
        self._check_positive()
        if self.is_trace:
            return self._trace()
        if self.dataset not in DATASETS:
            raise InvalidRequest("--dataset-name", f"{self.dataset!r} is not one of {', '.join(DATASETS)}")
        if self.dataset_path:
            reason = f"the dataset {self.dataset} reads no file: choose one with --dataset-name {' or '.join(_TRACES)}"
            raise InvalidRequest("--dataset-path", reason)
        if self.dataset == "multi_turn":
            return MultiTurn(
                self._arrivals(),
                max(1, self._count() // self.turns),
                self.turns,
                self.random_input_len,
                self.turn_len,
                self.random_output_len,
                self.think_s,
                self.seed,
            )
        return Synthetic(self._lengths(), self._arrivals(), self._count(), self.seed)

    @property
    def is_trace(self) -> bool:
        """Whether its arrivals come from a recorded trace."""
        return self.dataset in _TRACES

    def _check_positive(self) -> None:
        values = {"--request-rate": self.request_rate, "--burstiness": self.burstiness, "--time-scale": self.time_scale}
        values |= {"--length-scale": self.length_scale, "--output-scale": self.output_scale}
        for name, value in values.items():
            if not value > 0:
                raise InvalidRequest(name, f"{value:g} is not above 0")

    def _count(self) -> int:
        return 1000 if self.num_prompts is None else self.num_prompts

    def _lengths(self) -> Lengths:
        if self.dataset == "sharegpt-like":
            return sharegpt_like()
        if self.dataset == "prefix_repetition":
            return SharedPrefixes(self.num_prefixes, self.prefix_len, self.suffix_len, self.random_output_len)
        return RandomLengths(self.random_input_len, self.random_output_len, self.random_range_ratio)

    def _arrivals(self) -> Arrivals:
        if self.ramp_up_strategy:
            if self.ramp_up_strategy not in ("linear", "exponential"):
                raise InvalidRequest("--ramp-up-strategy", f"{self.ramp_up_strategy!r} is not linear or exponential")
            if self.ramp_up_start_rps <= 0 or self.ramp_up_end_rps <= 0:
                raise InvalidRequest("--ramp-up-strategy", "needs --ramp-up-start-rps and --ramp-up-end-rps")
            exponential = self.ramp_up_strategy == "exponential"
            return RampArrivals(self.ramp_up_start_rps, self.ramp_up_end_rps, exponential, self.burstiness)
        if self.request_rate == float("inf"):
            return UnpacedArrivals()
        if self.burstiness == float("inf"):
            return SteadyArrivals(self.request_rate)
        return GammaArrivals(self.request_rate, self.burstiness)

    def _trace(self) -> Trace:
        if not self.dataset_path:
            raise InvalidRequest("--dataset-path", f"the dataset {self.dataset} is a trace and needs its file")
        if self.request_rate != float("inf") or self.ramp_up_strategy:
            raise InvalidRequest("--request-rate", "a trace has its own arrivals; use --time-scale to change them")
        scale = TraceScale(
            self.time_scale, self.length_scale, self.output_scale, self.max_input_len, self.max_output_len
        )
        return Trace(
            Path(self.dataset_path),
            _TRACES[self.dataset],
            scale,
            limit=self.num_prompts,
            seed=self.seed,
            skip_broken=self.skip_broken_lines,
        )
