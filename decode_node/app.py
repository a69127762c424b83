"""Assembles the decode role of a node from its parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from baton.background import OnFault, current_watch
from baton.messages.ids import AttemptKey
from baton.messages.node import StageTimings
from baton.node.attempts.attempt_times import TransferFigures
from baton.node.reports.figures import KV_FETCH_HELP
from baton.node.role import NodeRole, RoleContext, Servicer
from baton.observe.metrics import Distribution, Figure, by_label
from baton.runner.blocks.block_digests import block_digests
from baton.wire.liveness import PeerAccess
from decode_node.connector import IntakeConnector
from decode_node.intake import Intake
from decode_node.senders import KnownSenders, own_kv_format
from kv_transfer.backends.base import TransferBackend
from kv_transfer.backends.nixl import NixlBackend
from kv_transfer.digests import digest_every
from kv_transfer.figures import failure_figures, handshake_figures, probe_figures, read_figures, transfer_figures
from kv_transfer.layout import PROTOCOL_VERSION, LayoutFingerprint, LinkIdentity
from kv_transfer.mover.mover import Mover
from kv_transfer.mover.part_mover import DeliverEvent
from kv_transfer.mover.parts_mover import PartsMover, mover_of_node
from kv_transfer.receiver.join_probe import JoinProbes
from kv_transfer.receiver.transfer import TransferBook


class DecodeRole:
    """The decode role: it reads the KV of prompts from prefill nodes, which it meets as they join the cluster."""

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

        every = digest_every(config.kv_digests, runner.memory.kind)
        # Probes need digests, whatever is wanted for prompts.
        digests = block_digests(runner.memory)

        def make_mover(deliver: DeliverEvent) -> PartsMover:
            def make_part(agent: str, deliver: DeliverEvent) -> Mover:
                return Mover(
                    lambda: make_backend(context, agent),
                    deliver,
                    context.clock,
                    digests=digests,
                    stall_s=config.kv_stall_s,
                )

            return mover_of_node(runner, context.incarnation, make_part, deliver, context.clock, config.kv_stall_s)

        book = TransferBook(
            digest_every=every,
            keeps_valid_blocks=config.on_transfer_failure == "recompute",
            clock=context.clock,
            vocab_size=runner.model.vocab_size,
        )
        self.intake = Intake(
            identity,
            make_mover,
            book,
            JoinProbes(identity.node_id, identity.incarnation, context.clock),
            context.tell_engine,
            context.record,
            context.post,
            context.clock,
            PeerAccess.of(context.dialer),
            runner.layout,
        )
        self._connector = IntakeConnector(self.intake, runner.layout, context.post)
        self._senders = KnownSenders(
            own_kv_format(runner.model, runner.layout, protocol), self.intake.sender_joined, self.intake.sender_left
        )
        self._membership = context.membership
        self._watch = current_watch.get()
        self._following: asyncio.Task[None] | None = None

    @property
    def connector(self) -> IntakeConnector:
        return self._connector

    @property
    def link_protocol(self) -> int:
        return self._identity.protocol

    @property
    def servicers(self) -> Sequence[Servicer]:
        return ()

    @property
    def handoff(self) -> Intake:
        return self.intake

    async def start(self) -> None:
        await self.intake.start()

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
        await self.intake.stop()

    def attempt_aborted(self, attempt: AttemptKey) -> None:
        self.intake.abandon(attempt)

    def attempt_timed(self, attempt: AttemptKey, timings: StageTimings) -> None:
        return

    def transfer_figures(self, attempt: AttemptKey) -> TransferFigures | None:
        stats = self._connector.stats(attempt)
        if stats is None:
            return None
        return TransferFigures(stats.num_bytes, stats.read_s * 1e3, self.intake.prompt_timings(attempt))

    def figures(self) -> Sequence[Figure | Distribution]:
        counts = self.intake.counts()
        stages = {"waiting_to_start": counts.waiting_to_start, "in_progress": counts.in_progress}
        return [
            *by_label("num_requests_kv_fetch_by_stage", KV_FETCH_HELP, "stage", stages),
            *failure_figures(self.intake.book.failures),
            *read_figures(self.intake.book.read_histograms),
            *handshake_figures(self.intake.links.handshakes),
            *transfer_figures(self.intake.report()),
            *probe_figures(self.intake.probes.outcomes, self.intake.failed_probes()),
        ]


def make_role(context: RoleContext) -> NodeRole:
    """Make a decode role that reads blocks with NIXL."""
    return DecodeRole(context, lambda c, agent: NixlBackend(agent, c.runner.memory))
