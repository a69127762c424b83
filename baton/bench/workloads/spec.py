"""A workload as plain values that fit a command line and a JSON object, so that every process can build it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from baton.bench.flag import Flag
from baton.errors import InvalidRequest

if TYPE_CHECKING:
    from baton.bench.workloads.day import Day
    from baton.bench.workloads.trace import Trace
    from baton.bench.workloads.workload import Arrivals, Lengths, Workload

Dataset = Literal["random", "sharegpt-like", "prefix_repetition", "multi_turn", "mooncake", "azure", "azure_day"]
DATASETS = get_args(Dataset)
_TRACES = ("mooncake", "azure", "azure_day")
PLAIN_BURSTINESS = Flag("1: Poisson arrivals; below 1: burstier; above 1: more even.", min=0.01)
"""For commands whose loads are random."""


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """The workload flags of `baton bench` commands; names are those of vLLM's flags where vLLM has them."""

    dataset: Annotated[str, Flag("Kind of workload.", "--dataset-name", kind=Dataset)] = "random"
    dataset_path: Annotated[
        str, Flag("File of a trace; of a day, the folder of its files.", kind=Path, convert=str)
    ] = ""
    num_prompts: Annotated[int | None, Flag("Number of requests. Default: 1000, or the whole trace.", min=1)] = None
    request_rate: Annotated[float, Flag("Requests per second; inf: all at once.")] = float("inf")
    burstiness: Annotated[
        float, Flag("1: Poisson arrivals; below 1: burstier; above 1: more even; inf: equal gaps.")
    ] = 1.0
    """Shape of the gaps' gamma distribution."""
    ramp_up_strategy: Annotated[
        str, Flag("How the rate changes over the run.", kind=Literal["linear", "exponential"])
    ] = ""
    ramp_up_start_rps: Annotated[float, Flag("Rate at the start of the run.", min=0)] = 0.0
    ramp_up_end_rps: Annotated[float, Flag("Rate at the end of the run.", min=0)] = 0.0
    random_input_len: Annotated[int, Flag("Tokens of a prompt (of a first turn).", min=1)] = 1024
    random_output_len: Annotated[
        int, Flag("Tokens to generate.", "--random-output-len --prefix-repetition-output-len", min=1)
    ] = 128
    random_range_ratio: Annotated[float, Flag("Lengths vary by this share.", min=0, max=0.999)] = 0.0
    num_prefixes: Annotated[int, Flag("Number of different prefixes.", "--prefix-repetition-num-prefixes", min=1)] = 10
    prefix_len: Annotated[int, Flag("Tokens of each prefix.", "--prefix-repetition-prefix-len", min=1)] = 256
    suffix_len: Annotated[int, Flag("Tokens after the prefix.", "--prefix-repetition-suffix-len", min=1)] = 256
    turns: Annotated[int, Flag("Turns of a conversation.", min=1)] = 4
    turn_len: Annotated[int, Flag("Tokens of a later turn's question.", min=1)] = 128
    think_s: Annotated[float, Flag("Mean pause between answer and question.", min=0)] = 0.0
    time_scale: Annotated[float, Flag("Replay a trace this many times as fast.")] = 1.0
    length_scale: Annotated[float, Flag("Factor of prompt and shared block lengths.")] = 1.0
    output_scale: Annotated[float, Flag("Factor of output lengths.")] = 1.0
    max_input_len: Annotated[int | None, Flag("Truncate longer prompts of a trace.", min=1)] = None
    max_output_len: Annotated[int | None, Flag("Limit longer outputs of a trace.", min=1)] = None
    skip_broken_lines: Annotated[bool, Flag("Skip broken lines of a trace.")] = False
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
            from baton.bench.workloads.synthetic import MultiTurn

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
        from baton.bench.workloads.workload import Synthetic

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
        from baton.bench.workloads.synthetic import RandomLengths, SharedPrefixes, sharegpt_like

        if self.dataset == "sharegpt-like":
            return sharegpt_like()
        if self.dataset == "prefix_repetition":
            return SharedPrefixes(self.num_prefixes, self.prefix_len, self.suffix_len, self.random_output_len)
        return RandomLengths(self.random_input_len, self.random_output_len, self.random_range_ratio)

    def _arrivals(self) -> Arrivals:
        from baton.bench.workloads.workload import GammaArrivals, RampArrivals, SteadyArrivals, UnpacedArrivals

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

    def _trace(self) -> Trace | Day:
        from baton.bench.workloads.day import Day
        from baton.bench.workloads.trace import AZURE, MOONCAKE, Trace, TraceScale

        if not self.dataset_path:
            raise InvalidRequest("--dataset-path", f"the dataset {self.dataset} is a trace and needs its file")
        if self.request_rate != float("inf") or self.ramp_up_strategy:
            raise InvalidRequest("--request-rate", "a trace has its own arrivals; use --time-scale to change them")
        scale = TraceScale(
            self.time_scale, self.length_scale, self.output_scale, self.max_input_len, self.max_output_len
        )
        if self.dataset == "azure_day":
            if self.num_prompts is not None:
                raise InvalidRequest("--num-prompts", "a day has its own number of requests; --time-scale changes it")
            return Day(Path(self.dataset_path), scale, self.seed, skip_broken=self.skip_broken_lines)
        return Trace(
            Path(self.dataset_path),
            {"mooncake": MOONCAKE, "azure": AZURE}[self.dataset],
            scale,
            limit=self.num_prompts,
            seed=self.seed,
            skip_broken=self.skip_broken_lines,
        )
