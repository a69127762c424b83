"""What a router counts since its start, as its metrics page shows it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated

from baton.messages.generation import Finished
from baton.metric import Metric
from baton.observe.metrics import FIRST_TOKEN_BUCKETS_S, Histogram
from router.flight.flight_table import AttemptCause

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
    not_bit_exact: Annotated[
        int,
        Metric(
            "request_not_bit_exact_total",
            "Those whose tokens may depend on their nodes: of several numerics, or of a node that is not bit-exact.",
        ),
    ] = 0
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

    def count(self, finished: Finished) -> None:
        """Count a request that ended well."""
        self.prompt_tokens += finished.prompt_tokens
        self.generation_tokens += finished.completion_tokens
        self.by_finish_reason[finished.finish_reason] += 1
        self.not_bit_exact += finished.bit_exact is False
        self.e2e.observe(finished.total_ms / 1e3)
        self.prefill.observe(finished.prefill_ms / 1e3)
        if finished.embedding:
            return  # an embedding has no output tokens
        self.ttft.observe(finished.ttft_ms / 1e3)
        self.decode.observe((finished.total_ms - finished.ttft_ms) / 1e3)
        if finished.completion_tokens > 1:
            self.tpot.observe((finished.total_ms - finished.ttft_ms) / 1e3 / (finished.completion_tokens - 1))


def _in_snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


@dataclass(slots=True)
class DispatchCounters:
    """What a router has counted since its start. A field that declares a metric is on its metrics page."""

    accepted: Annotated[int, Metric("requests_accepted_total", "Requests that passed every check.")] = 0
    failed: Annotated[int, Metric("request_failure_total", "Accepted requests that failed.")] = 0
    """Without those that their client cancelled: a client that leaves is no fault of the cluster."""
    resumed: Annotated[int, Metric("requests_resumed_total", "Requests whose client came back for what follows.")] = 0
    adopted: Annotated[int, Metric("requests_adopted_total", "Those that ran on meanwhile, for another router.")] = 0
    moved: Annotated[int, Metric("requests_moved_total", "Requests that another router took over from this one.")] = 0
    links_back: Annotated[int, Metric("node_links_back_total", "Links to nodes that were cut and came back.")] = 0
    late_deltas: Annotated[
        int, Metric("late_deltas_total", "Steps' results that came for requests that were over.")
    ] = 0
    attempts: Annotated[
        Counter[AttemptCause],
        Metric(
            "request_attempts_total",
            "Attempts that were sent to nodes, by why there was one.",
            label="cause",
            keys=AttemptCause,
            label_value=attrgetter("value"),
        ),
    ] = field(default_factory=Counter)
    rejections: Annotated[
        Counter[str],
        Metric(
            "rejections_total",
            "Requests that were turned away before they had a token.",
            label="reason",
            label_value=_in_snake_case,
        ),
    ] = field(default_factory=Counter)
    """By the class of the error."""
    errors: Annotated[
        Counter[str],
        Metric(
            "request_errors_total",
            "Accepted requests that ended with an error, by that error; cancelled: their client left or asked to stop.",
            label="error",
            # Shown from the start, since Prometheus does not see the first increment of a series that begins with it.
            keys=("AttemptsExhausted", "Cancelled", "DeadlineExceeded", "EngineFault", "SlowReader", "TransferFailed"),
            label_value=_in_snake_case,
        ),
    ] = field(default_factory=Counter)
    """By the class of the error."""
    queue_time: Annotated[
        Histogram,
        Metric("request_queue_time_seconds", "What requests waited at the router until a node was found."),
    ] = field(default_factory=lambda: Histogram(FIRST_TOKEN_BUCKETS_S))
    """In seconds; requests that never had to wait are counted with nearly 0."""
    served: Served = field(default_factory=Served)
    finished: int = 0
    """Accepted requests that ended well."""
    adoption_looks: int = 0
    """How often a flight was asked whether its node had replayed all that it had for another router."""
