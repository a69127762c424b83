"""Assembles the prefill role of a node from its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from baton.errors import TransferCause
from baton.messages.ids import AttemptKey
from baton.messages.node import StageTimings
from baton.node.attempts.attempt_times import TransferFigures
from baton.node.role import NodeRole, RoleContext, Servicer
from baton.observe.metrics import Distribution, Figure, declared_figures
from baton.wire.liveness import is_running
from kv_transfer.backends.base import TransferBackend
from kv_transfer.backends.nixl import NixlBackend
from kv_transfer.digests import digest_every
from kv_transfer.figures import probe_figures, refusal_figures
from kv_transfer.layout import PROTOCOL_VERSION, LayoutFingerprint, LinkIdentity
from kv_transfer.mover.mover import Mover
from kv_transfer.mover.part_mover import DeliverEvent
from kv_transfer.mover.parts_mover import PartsMover, digests_of_node, mover_of_node
from kv_transfer.sender.lease_values import LeaseTimes
from prefill_node.connector import OfferConnector
from prefill_node.handoff import HandOff


class PrefillRole:
    """The prefill role: it leases the blocks that the engine computed, and serves KvLink to decode nodes."""

    def __init__(
        self,
        context: RoleContext,
        make_backend: Callable[[RoleContext, str], TransferBackend],
        protocol: int = PROTOCOL_VERSION,
    ) -> None:
        """`make_backend` makes a transfer agent of a name. `protocol`: the version of the link's protocol; tests pass
        other versions."""
        runner, config = context.runner, context.config
        layout = LayoutFingerprint.of(runner.model, runner.layout, NixlBackend.name)
        identity = LinkIdentity(config.cluster, config.node_id, context.incarnation, layout, context.address, protocol)
        self._identity = identity

        def make_mover(deliver: DeliverEvent) -> PartsMover:
            def make_part(agent: str, deliver: DeliverEvent) -> Mover:
                return Mover(lambda: make_backend(context, agent), deliver, context.clock)

            return mover_of_node(runner, context.incarnation, make_part, deliver, context.clock)

        every = digest_every(config.kv_digests, runner.memory.kind)
        digests = digests_of_node(runner, lambda: self.handoff.mover.parts) if every else None
        self.handoff = HandOff(
            identity,
            runner.memory,
            make_mover,
            context.tell_engine,
            context.record,
            context.clock,
            LeaseTimes(unclaimed_s=config.kv_unclaimed_s),
            digests=digests,
            digest_every=every,
            is_running=partial(is_running, dialer=context.dialer),
        )
        self._connector = OfferConnector(
            self.handoff, runner.layout, context.post_after_step, context.post, context.after_step
        )

    @property
    def connector(self) -> OfferConnector:
        return self._connector

    @property
    def link_protocol(self) -> int:
        return self._identity.protocol

    @property
    def servicers(self) -> Sequence[Servicer]:
        return (self.handoff,)

    async def start(self) -> None:
        await self.handoff.start()

    def serving(self) -> None:
        return

    async def stop(self) -> None:
        await self.handoff.stop()

    def attempt_aborted(self, attempt: AttemptKey) -> None:
        self.handoff.withdraw(attempt, "aborted", TransferCause.CANCELLED)

    def attempt_timed(self, attempt: AttemptKey, timings: StageTimings) -> None:
        self.handoff.timed(attempt, timings)

    def transfer_figures(self, attempt: AttemptKey) -> TransferFigures | None:
        return None

    def figures(self) -> Sequence[Figure | Distribution]:
        return [
            *declared_figures(self.handoff.stats()),
            *refusal_figures(self.handoff.report()),
            *probe_figures(self.handoff.probes.outcomes, self.handoff.failed_probes()),
        ]


def make_role(context: RoleContext) -> NodeRole:
    """Make a prefill role whose blocks decode nodes read with NIXL."""
    return PrefillRole(context, lambda c, agent: NixlBackend(agent, c.runner.memory))
