"""What a router counts of requests that ended well: tokens, finish reasons and latencies."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated

from baton.messages.generation import Finished
from baton.metric import Metric
from baton.observe.metrics import FIRST_TOKEN_BUCKETS_S, Histogram

# vLLM's buckets, so that its dashboards fit.
_OUTPUT_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_REQUEST_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0),
    *(15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
)


@dataclass(slots=True)
class Served:
    """What a router has counted of requests that ended well, since its start."""

    by_finish_reason: Annotated[
        Counter[str],
        Metric("request_success_total", "Requests that ended well.", label="finished_reason", keys=("stop", "length")),
    ] = field(default_factory=Counter)
    prompt_tokens: Annotated[int, Metric("prompt_tokens_total", "Tokens of their prompts.")] = 0
    generation_tokens: Annotated[int, Metric("generation_tokens_total", "Tokens of their answers.")] = 0
    ttft: Annotated[
        Histogram, Metric("time_to_first_token_seconds", "From a request's arrival here to its first token.")
    ] = field(default_factory=lambda: Histogram(FIRST_TOKEN_BUCKETS_S))
    tpot: Annotated[
        Histogram, Metric("request_time_per_output_token_seconds", "Mean time of a request's tokens after the first.")
    ] = field(default_factory=lambda: Histogram(_OUTPUT_TOKEN_BUCKETS_S))
    gaps: Annotated[
        Histogram, Metric("inter_token_latency_seconds", "Between a sequence's tokens, as they came here.")
    ] = field(default_factory=lambda: Histogram(_OUTPUT_TOKEN_BUCKETS_S))
    """Seconds between two messages with tokens of one sequence; also of requests that fail later."""
    e2e: Annotated[Histogram, Metric("e2e_request_latency_seconds", "From a request's arrival here to its end.")] = (
        field(default_factory=lambda: Histogram(_REQUEST_BUCKETS_S))
    )
    prefill: Annotated[Histogram, Metric("request_prefill_time_seconds", "What its node took for the prompt.")] = field(
        default_factory=lambda: Histogram(FIRST_TOKEN_BUCKETS_S)
    )
    decode: Annotated[Histogram, Metric("request_decode_time_seconds", "From a request's first token to its last.")] = (
        field(default_factory=lambda: Histogram(_REQUEST_BUCKETS_S))
    )

    def ended(self, finished: Finished) -> None:
        """Count a request that ended well."""
        self.prompt_tokens += finished.prompt_tokens
        self.generation_tokens += finished.completion_tokens
        self.by_finish_reason[finished.finish_reason] += 1
        self.e2e.observe(finished.total_ms / 1e3)
        self.prefill.observe(finished.prefill_ms / 1e3)
        if finished.embedding:
            return  # an embedding has no output tokens
        self.ttft.observe(finished.ttft_ms / 1e3)
        self.decode.observe((finished.total_ms - finished.ttft_ms) / 1e3)
        if finished.completion_tokens > 1:
            self.tpot.observe((finished.total_ms - finished.ttft_ms) / 1e3 / (finished.completion_tokens - 1))
