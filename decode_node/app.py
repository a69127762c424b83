"""Assembles the decode role of a node from its parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.background import OnFault, current_watch
from baton.node.kv.kv_role import KvRole
from baton.node.role import NodeRole, RoleContext
from decode_node.senders import KnownSenders, own_kv_format
from kv_transfer.backends.base import TransferBackend
from kv_transfer.backends.nixl import NixlBackend
from kv_transfer.layout import PROTOCOL_VERSION


class DecodeRole(KvRole):
    """The decode role: it reads the KV of prompts from prefill nodes, which it meets as they join the cluster."""

    def __init__(
        self,
        context: RoleContext,
        make_backend: Callable[[RoleContext, str], TransferBackend],
        protocol: int = PROTOCOL_VERSION,
    ) -> None:
        """See `KvRole`."""
        super().__init__(context, make_backend, protocol)
        self._senders = KnownSenders(
            own_kv_format(context.runner.model.dtype, self.identity), self.intake.sender_joined, self.intake.sender_left
        )
        self._membership = context.membership
        self._watch = current_watch.get()
        self._following: asyncio.Task[None] | None = None

    def serving(self) -> None:
        membership = self._membership
        if membership is not None:
            # It ends when the registry is closed.
            self._following = self._watch.start(
                lambda: self._senders.follow(membership.watch()), "meet-senders", on_fault=OnFault.RESTART, may_end=True
            )

    async def stop(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await super().stop()


def make_role(context: RoleContext) -> NodeRole:
    """Make a decode role that reads blocks with NIXL."""
    return DecodeRole(context, lambda c, agent: NixlBackend(agent, c.runner.memory))
