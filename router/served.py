"""What a router's clients got: how much, how it ended, and how long it took them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from baton.messages.generation import Finished
from baton.observe.metrics import FIRST_TOKEN_BUCKETS_S, Distribution, Figure, Histogram, by_label

# vLLM's, so that its dashboards fit.
_OUTPUT_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_REQUEST_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0),
    *(15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
)


class Served:
    """Totals since start, of requests that ended well."""

    def __init__(self) -> None:
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._reasons = Counter(stop=0, length=0)
        self._ttft = Histogram(FIRST_TOKEN_BUCKETS_S)
        self._tpot = Histogram(_OUTPUT_TOKEN_BUCKETS_S)
        self._e2e = Histogram(_REQUEST_BUCKETS_S)
        self._prefill = Histogram(FIRST_TOKEN_BUCKETS_S)
        self._decode = Histogram(_REQUEST_BUCKETS_S)
        self.gaps = Histogram(_OUTPUT_TOKEN_BUCKETS_S)
        """Between what came of one sequence and what came next, in seconds; of those that end badly, too."""

    def ended(self, finished: Finished) -> None:
        """Count a request that ended well."""
        self._prompt_tokens += finished.prompt_tokens
        self._generation_tokens += finished.completion_tokens
        self._reasons[finished.finish_reason] += 1
        self._e2e.observe(finished.total_ms / 1e3)
        self._prefill.observe(finished.prefill_ms / 1e3)
        if finished.embedding:
            return  # there are no tokens whose time would be told
        self._ttft.observe(finished.ttft_ms / 1e3)
        self._decode.observe((finished.total_ms - finished.ttft_ms) / 1e3)
        if finished.completion_tokens > 1:
            self._tpot.observe((finished.total_ms - finished.ttft_ms) / 1e3 / (finished.completion_tokens - 1))

    @property
    def num_tokens(self) -> int:
        """Of all answers."""
        return self._generation_tokens

    def figures(self) -> Iterator[Figure | Distribution]:
        """For the metrics page."""
        yield from by_label("request_success_total", "Requests that ended well.", "finished_reason", self._reasons)
        yield Figure("prompt_tokens_total", "Tokens of their prompts.", self._prompt_tokens, {})
        yield Figure("generation_tokens_total", "Tokens of their answers.", self._generation_tokens, {})
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From a request's arrival here to its first token.", self._ttft),
            ("request_time_per_output_token_seconds", "Mean time of a request's tokens after the first.", self._tpot),
            ("inter_token_latency_seconds", "Between a sequence's tokens, as they came here.", self.gaps),
            ("e2e_request_latency_seconds", "From a request's arrival here to its end.", self._e2e),
            ("request_prefill_time_seconds", "What its node took for the prompt.", self._prefill),
            ("request_decode_time_seconds", "From a request's first token to its last.", self._decode),
        ):
            yield histogram.now(name, text)
