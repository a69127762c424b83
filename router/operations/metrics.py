"""A router's metrics page: the figures of all its parts. Names are vLLM's where it has them, after `baton_`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from baton.observe.metrics import Distribution, Figure, by_label, declared_figures
from baton.security.connection_limit import ConnectionLimit, Refusal
from router.live_requests import LiveRequests
from router.placement.room import Lack
from router.placement.view import ClusterView


def figures(requests: LiveRequests, view: ClusterView, now: float, wall: float) -> Iterator[Figure | Distribution]:
    """The router's totals and its present state. `now`: seconds on its clock; `wall`: seconds since the epoch."""
    waiting = requests.num_waiting
    text = "Requests on nodes, or whose client still reads."
    yield Figure("num_requests_running", text, requests.num_live - waiting, {})
    yield Figure("num_requests_waiting", "Requests that wait for a node.", waiting, {})
    text = "Bytes that log-probabilities of live requests may come to."
    yield Figure("logprob_reserved_bytes", text, requests.logprob_budget.num_bytes, {})
    yield from declared_figures(requests.counters)
    yield from requests.attainment.figures()
    yield from requests.placer.figures(now)
    text = "How often a node with room for more requests came to have none, by what it lacked."
    yield from by_label("router_node_full_total", text, "why", {lack.value: view.num_full[lack] for lack in Lack})
    for status in view.statuses(now, wall):
        # The name and role of the node, not of this process.
        labels = {"node": status.name, "role": status.role}
        yield Figure("node_up", "Whether a node can be given work.", float(status.status == "Ready"), labels)


class CountsConnections(Protocol):
    """A server of clients."""

    @property
    def num_connections(self) -> int | None:
        """Open connections; None: the server does not count them."""
        ...


class CountsCalls(CountsConnections, Protocol):
    """A gRPC server of clients."""

    @property
    def num_calls(self) -> int | None:
        """Calls that have not ended; None: the server does not count them."""
        ...


def connection_figures(grpc: CountsCalls, http: CountsConnections, limit: ConnectionLimit) -> Iterator[Figure]:
    """What clients hold open at the public ports, and the connections that the limit has closed."""
    for name, text, value in (
        ("grpc_connections", "Open connections of gRPC clients.", grpc.num_connections),
        ("grpc_calls", "Calls of gRPC clients that have not ended.", grpc.num_calls),
        ("http_connections", "Open connections of HTTP clients.", http.num_connections),
    ):
        if value is not None:
            yield Figure(name, text, value, {})
    text = "Connections that were closed for a limit, new ones at once and silent ones for new ones, by that limit."
    refused = limit.refused
    by_limit = {refusal.name.lower(): sum(refused[key] for key in refused if key[1] is refusal) for refusal in Refusal}
    yield from by_label("connections_refused_total", text, "limit", by_limit)
