"""The counters of an engine that its metrics page shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.metric import Metric


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine's start. All parts of an engine count in one instance, which the scheduler's state has.

    A new metric is a field here and the line that counts it.
    """

    num_skipped_results: Annotated[
        int, Metric("skipped_results_total", "Results for requests that had ended meanwhile.")
    ] = 0
    """Results for requests that had ended or were never scheduled."""
    num_unknown_transfers: Annotated[
        int, Metric("unknown_transfers_total", "Transfer reports that no request waited for.")
    ] = 0
    num_connector_errors: Annotated[
        int, Metric("kv_connector_errors_total", "Calls of the KV connector that raised.")
    ] = 0
    num_encoded_inputs: Annotated[
        int, Metric("encoded_inputs_total", "Inputs (images, speech, texts) of which the encoder made rows.")
    ] = 0
    num_fetched_inputs: Annotated[
        int, Metric("fetched_inputs_total", "Inputs whose rows came from a node that had made them.")
    ] = 0
    num_encoder_hits: Annotated[
        int, Metric("encoder_cache_hits_total", "Inputs of prompts that were computed with rows made earlier.")
    ] = 0
