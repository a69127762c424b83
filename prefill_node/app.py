"""The prefill node: an engine that offers what it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.config import NodeConfig
from baton.engine.runner.block_digests import block_digests
from baton.ids import AttemptKey
from baton.node.attempt_clock import TransferFigures
from baton.node.process import run_node
from baton.node.role import NodeRole, RoleContext, Servicer
from baton.observe.metrics import Figure, by_label
from baton.rpc.messages import HandoffReport
from kv_transfer.backends.base import TransferBackend
from kv_transfer.backends.nixl import NixlBackend
from kv_transfer.digests import digest_every
from kv_transfer.figures import refusal_figures
from kv_transfer.layout import LayoutFingerprint, LinkIdentity
from kv_transfer.mover import Mover
from kv_transfer.mover_events import MoverEvent
from prefill_node.handoff import HandOff, OfferConnector


class PrefillRole:
    """Leases and offers behind the engine; KvLink in front of the decode nodes."""

    def __init__(self, context: RoleContext, make_backend: Callable[[RoleContext], TransferBackend]) -> None:
        runner, config = context.runner, context.config
        layout = LayoutFingerprint.of(runner.model, runner.layout, NixlBackend.name)
        identity = LinkIdentity(config.cluster, config.node_id, context.incarnation, layout, context.address)

        def make_mover(deliver: Callable[[MoverEvent], None]) -> Mover:
            return Mover(lambda: make_backend(context), deliver, context.clock)

        every = digest_every(config.kv_digests, runner.memory.kind)
        digests = block_digests(runner.memory) if every else None
        self.handoff = HandOff(
            identity,
            runner.memory,
            make_mover,
            context.tell_engine,
            context.record,
            context.clock,
            digests=digests,
            digest_every=every,
        )
        self._connector = OfferConnector(self.handoff, runner.layout, context.post_after_step, context.post)

    @property
    def connector(self) -> OfferConnector:
        return self._connector

    @property
    def servicers(self) -> Sequence[Servicer]:
        return (self.handoff,)

    async def start(self) -> None:
        await self.handoff.start()

    async def stop(self) -> None:
        await self.handoff.stop()

    def attempt_aborted(self, attempt: AttemptKey) -> None:
        self.handoff.withdraw(attempt, "aborted")

    def transfer_figures(self, attempt: AttemptKey) -> TransferFigures | None:
        return None

    def figures(self) -> Sequence[Figure]:
        stats = self.handoff.stats()
        leases = {"granted": stats.granted, "reading": stats.reading, "suspect": stats.suspect}
        return [
            *by_label("kv_leases", "Leases that are out, by state.", "state", leases),
            Figure("kv_lease_age_seconds", "Age of the oldest lease; 0: none is out.", stats.oldest_s, {}),
            *refusal_figures(self.handoff.report()),
        ]

    def handoff_report(self) -> HandoffReport:
        return self.handoff.report()


def make_role(context: RoleContext) -> NodeRole:
    """A prefill role over NIXL."""
    return PrefillRole(context, lambda c: NixlBackend(c.incarnation, c.runner.memory))


def main(config: NodeConfig) -> int:
    """Run a prefill node until it is told to stop; returns the exit code."""
    return run_node(config, make_role)
