"""Assembles the prefill role of a node from its parts."""

from __future__ import annotations

from baton.messages.ids import AttemptKey
from baton.node.kv.kv_role import KvRole
from baton.node.role import NodeRole, RoleContext
from kv_transfer.backends.nixl import NixlBackend


class PrefillRole(KvRole):
    """The prefill role: decode nodes wait for what it computes, so it remembers what was aborted before it began."""

    def attempt_aborted(self, attempt: AttemptKey) -> None:
        self.intake.abandon(attempt)
        self.offering.aborted(attempt)


def make_role(context: RoleContext) -> NodeRole:
    """Make a prefill role whose blocks other nodes read with NIXL."""
    return PrefillRole(context, lambda c, agent: NixlBackend(agent, c.runner.memory))
