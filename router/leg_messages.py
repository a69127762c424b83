"""Sends what flights tell nodes, and keeps the aborts that a node misses while its link is cut."""

from __future__ import annotations

from typing import Protocol

from baton.messages.node import Abort, Adopt, RouterMessage, Submit
from router.placement.view import ClusterView


class NodeSender(Protocol):
    """Sends messages to nodes; `router.node_links.NodeLinks` is the real one."""

    def send(self, incarnation: str, message: RouterMessage) -> bool:
        """Queue a message without waiting; False if there is no stream to that incarnation."""
        ...


class LegMessages:
    """Sends the messages of flights to nodes. A node whose link is cut gets its aborts when the link is open again."""

    def __init__(self, view: ClusterView, nodes: NodeSender) -> None:
        self._view = view
        self._nodes = nodes
        self._aborts: dict[str, list[Abort]] = {}
        """By incarnation, for each node whose link is cut: at most one for each sequence that runs there."""

    def submit(self, incarnation: str, submit: Submit, num_cached_tokens: int = 0) -> bool:
        """Send a leg; False if the node is gone. `num_cached_tokens`: of its prompt, expected on the node."""
        num_tokens = max(1, submit.num_tokens - num_cached_tokens)
        self._view.dispatched(incarnation, submit.attempt, submit.num_sequences, num_tokens)
        return self._nodes.send(incarnation, submit)

    def adopt(self, incarnation: str, adopt: Adopt, num_sequences: int) -> bool:
        """Ask a node to continue a leg; False if the node is gone. One whose link is cut again is asked again later."""
        self._view.dispatched(incarnation, adopt.attempt, num_sequences)
        return self._nodes.send(incarnation, adopt) or incarnation in self._aborts

    def abort(self, incarnation: str, abort: Abort) -> None:
        """Tell a node that a leg is over."""
        if not self._nodes.send(incarnation, abort) and incarnation in self._aborts:
            self._aborts[incarnation].append(abort)

    def link_cut(self, incarnation: str) -> None:
        """Keep the node's aborts from now on."""
        self._aborts[incarnation] = []

    def link_open(self, incarnation: str) -> bool:
        """Send the kept aborts; returns whether the link was cut before."""
        aborts = self._aborts.pop(incarnation, None)
        for abort in aborts or ():
            self._nodes.send(incarnation, abort)
        return aborts is not None

    def node_lost(self, incarnation: str) -> None:
        """Forget the node's aborts."""
        self._aborts.pop(incarnation, None)
