"""The metrics of an engine, under vLLM's names where vLLM has them."""

from __future__ import annotations

from baton.engine.batch import ComputedStep, SchedulerStats, StepTimes
from baton.observe.metrics import Distribution, Figure, Histogram, by_label

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

    def note(self, step: ComputedStep) -> None:
        """Count one more step."""
        self.prompt_tokens += step.num_prefill_tokens
        self._tokens.observe(step.num_prefill_tokens + step.num_decodes)

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


def engine_figures(stats: SchedulerStats, times: StepTimes) -> list[Figure]:
    """The engine's metrics, for the node's metrics page."""
    return [*_requests(stats), *_blocks(stats), *_prefix_cache(stats), *_steps(times), *_faults(stats)]


def _one(name: str, text: str, value: float) -> Figure:
    return Figure(name, text, value, {})


def _requests(stats: SchedulerStats) -> list[Figure]:
    reasons, waiting = stats.num_requests_waiting_by_reason, "Requests that wait, by what they wait for."
    return [
        _one("num_requests_running", "Requests in the running batch.", stats.num_running),
        _one("num_requests_waiting", "Requests that wait for anything.", stats.num_waiting),
        *by_label("num_requests_waiting_by_reason", waiting, "reason", reasons),
        *by_label("num_requests_kv_fetch_by_stage", KV_FETCH_HELP, "stage", {"completed_waiting": reasons["arrived"]}),
        *by_label("num_preemptions_total", "Preemptions.", "mode", stats.num_preemptions_by_mode),
    ]


def _blocks(stats: SchedulerStats) -> list[Figure]:
    return [
        _one("kv_cache_usage_perc", "Share of the KV cache's blocks in use, 0 to 1.", stats.kv_cache_usage),
        _one("kv_cache_blocks", "Blocks of the KV cache.", stats.total_blocks),
        _one("kv_leased_blocks", "Blocks of ended requests that a peer may still read.", stats.leased_blocks),
        _one("kv_quarantined_blocks", "Blocks of ended requests that reads may still fill.", stats.quarantined_blocks),
        _one("kv_host_cache_usage_perc", "Share of the host tier's blocks in use, 0 to 1.", stats.host_cache_usage),
        _one("kv_host_cache_blocks", "Blocks of the host tier; 0: there is none.", stats.total_host_blocks),
    ]


def _prefix_cache(stats: SchedulerStats) -> list[Figure]:
    cache, source = stats.prefix_cache, "source"
    hits = "Tokens of admitted requests whose KV was there already, by source."
    requests = "Admitted requests of which some KV was there already, by source."
    return [
        _one("prefix_cache_queries_total", "Tokens of admitted requests.", cache.num_tokens),
        *by_label("prefix_cache_hits_total", hits, source, cache.num_hit_tokens),
        _one("prefix_cache_requests_total", "Admissions that searched for known KV.", cache.num_requests),
        *by_label("prefix_cache_request_hits_total", requests, source, cache.num_hits),
    ]


def _steps(times: StepTimes) -> list[Figure]:
    seconds = {"schedule": times.schedule_s, "run": times.run_s, "update": times.update_s}
    return [
        _one("engine_steps_total", "Steps that the runner was given.", times.num_steps),
        *by_label("engine_step_seconds_total", "Time that steps took, by part.", "stage", seconds),
    ]


def _faults(stats: SchedulerStats) -> list[Figure]:
    return [
        _one("skipped_results_total", "Results for requests that had ended meanwhile.", stats.num_skipped_results),
        _one("unknown_transfers_total", "Transfer reports that no request waited for.", stats.num_unknown_transfers),
        _one("kv_connector_errors_total", "Calls of the KV connector that raised.", stats.num_connector_errors),
    ]
