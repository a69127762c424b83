"""The metrics of a node's engine and of the processes that compute its model, under vLLM's names where it has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.engine.batch import SchedulerStats, StepTimes
from baton.engine.runner import ModelInfo
from baton.messages.node import StepFigures
from baton.messages.node_report import RankReport
from baton.observe.metrics import Distribution, Figure, Histogram, by_label, declared_figures

KV_FETCH_HELP = "Requests whose prompt is computed elsewhere, by how far its KV is."
"""The engine counts requests whose KV has arrived, a role those whose KV has not."""

_ITERATION_TOKENS = (1, 8, *(1 << power for power in range(4, 15)))
"""vLLM's buckets."""


class ComputedTotals:
    """What an engine's steps have computed since the start."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        """Prompt tokens, those that were computed again after a preemption included."""
        self._tokens = Histogram(_ITERATION_TOKENS)

    def note(self, step: StepFigures) -> None:
        """Count one more step."""
        self.prompt_tokens += step.prefill_tokens
        self._tokens.observe(step.prefill_tokens + step.decode_rows)

    def figures(self, stats: SchedulerStats) -> list[Figure | Distribution]:
        """The metrics; `stats` has where the tokens of prompts came from that no step computed."""
        hits, text = stats.prefix_cache.num_hit_tokens, "Tokens of prompts, by where their KV is from."
        sources = {
            "local_compute": self.prompt_tokens,
            "local_cache_hit": hits["device"] + hits["host"],
            "external_kv_transfer": hits["remote"],
        }
        return [
            *by_label("prompt_tokens_by_source_total", text, "source", sources),
            self._tokens.now("iteration_tokens_total", "Tokens that a step computed."),
        ]


def model_figures(model: ModelInfo) -> list[Figure]:
    """What the checks at start have found out of the model."""
    verified = (
        "1: the model's logits were those of transformers in the check at start; 0: they were not, or not compared."
    )
    bit_exact = "1: a token depends on its request alone, as the check at start found; 0: it may depend on its batch."
    return [
        Figure("model_verified", verified, float(model.is_verified), {}),
        Figure("model_bit_exact", bit_exact, float(model.bit_exact), {}),
    ]


def engine_figures(stats: SchedulerStats, times: StepTimes) -> list[Figure | Distribution]:
    """The engine's metrics, for the node's metrics page: those that `SchedulerStats` declares, and some from them."""
    stages = {"completed_waiting": stats.num_requests_waiting_by_reason["arrived"]}
    seconds = {"schedule": times.schedule_s, "run": times.run_s, "update": times.update_s}
    usage, host_usage = stats.kv_cache_usage, stats.host_cache_usage
    return [
        *declared_figures(stats),
        *by_label("num_requests_kv_fetch_by_stage", KV_FETCH_HELP, "stage", stages),
        Figure("kv_cache_usage_perc", "Share of the KV cache's blocks in use, 0 to 1.", usage, {}),
        Figure("kv_host_cache_usage_perc", "Share of the host tier's blocks in use, 0 to 1.", host_usage, {}),
        Figure("engine_steps_total", "Steps that the runner was given.", times.num_steps, {}),
        *by_label("engine_step_seconds_total", "Time that steps took, by part.", "stage", seconds),
    ]


def rank_figures(reports: Sequence[RankReport]) -> Iterator[Figure]:
    """The metrics of the ranks, for the metrics page."""
    for report in reports:
        for name, text, value in (
            ("rank_up", "Whether the process of a rank runs: 1 or 0.", report.is_up),
            (
                "rank_resident_memory_bytes",
                "Memory of a rank in use, its shared memory included.",
                report.resident_bytes,
            ),
            ("rank_shared_memory_bytes", "Memory that a rank shares with the node's others.", report.shared_bytes),
            ("rank_cpu_seconds_total", "Processor time of all threads of a rank.", report.cpu_s),
            ("rank_threads", "Threads of a rank.", report.num_threads),
        ):
            yield Figure(name, text, float(value), {"rank": str(report.rank)})
