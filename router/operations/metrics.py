"""A router's figures for Prometheus. Names are vLLM's where it has them, behind `baton_`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from baton.observe.metrics import Distribution, Figure, by_label
from baton.security.connection_limit import Refusal
from router.flight.flight_table import AttemptCause
from router.live_requests import LiveRequests
from router.placement.view import ClusterView


def figures(requests: LiveRequests, view: ClusterView, now: float, wall: float) -> Iterator[Figure | Distribution]:
    """What the router has done since its start, and what it sees now."""
    counters = requests.counters
    waiting = requests.num_waiting
    for name, text, value in (
        ("num_requests_running", "Requests on nodes, or whose client still reads.", requests.num_live - waiting),
        ("num_requests_waiting", "Requests that wait for a node.", waiting),
        ("requests_accepted_total", "Requests that passed every check.", counters.accepted),
        ("request_failure_total", "Accepted requests that failed.", counters.failed),
        ("requests_resumed_total", "Requests whose client came back for what follows.", counters.resumed),
        ("requests_adopted_total", "Those that ran on meanwhile, for another router.", counters.adopted),
        ("requests_moved_total", "Requests that another router took over from this one.", counters.moved),
        ("node_links_back_total", "Links to nodes that were cut and came back.", counters.links_back),
        ("late_deltas_total", "Steps' results that came for requests that were over.", counters.late_deltas),
    ):
        yield Figure(name, text, value, {})
    text = "Attempts that were sent to nodes, by why there was one."
    yield from by_label("request_attempts_total", text, "cause", {c.value: counters.attempts[c] for c in AttemptCause})
    text = "Requests that were turned away before they had a token."
    rejections = {_snake_case(name): count for name, count in counters.rejections.items()}
    yield from by_label("rejections_total", text, "reason", rejections)
    text = "What requests waited at the router until a node was found."
    yield counters.queue_time.now("request_queue_time_seconds", text)
    yield from counters.served.figures()
    yield from requests.placer.figures(now)
    for status in view.statuses(now, wall):
        # Not this process's own name and role, which its other figures have.
        labels = {"node": status.name, "role": status.role}
        yield Figure("node_up", "Whether a node can be given work.", float(status.status == "Ready"), labels)


def connection_figures(
    grpc_connections: int | None,
    grpc_calls: int | None,
    http_connections: int,
    refused: Mapping[tuple[str, Refusal], int],
) -> Iterator[Figure]:
    """What clients hold open at the public ports; None: that server does not count it.

    `refused`: connections that were closed for a limit, by listener and limit.
    """
    for name, text, value in (
        ("grpc_connections", "Open connections of gRPC clients.", grpc_connections),
        ("grpc_calls", "Calls of gRPC clients that have not ended.", grpc_calls),
        ("http_connections", "Open connections of HTTP clients.", http_connections),
    ):
        if value is not None:
            yield Figure(name, text, value, {})
    text = "Connections that were closed for a limit, new ones at once and silent ones for new ones, by that limit."
    by_limit = {limit.name.lower(): sum(refused[key] for key in refused if key[1] is limit) for limit in Refusal}
    yield from by_label("connections_refused_total", text, "limit", by_limit)


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
