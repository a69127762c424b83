"""What every node can do with KV, whatever its role: it offers blocks, and it reads those of others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from baton.messages.ids import AttemptKey
from baton.messages.node import StageTimings
from baton.messages.node_report import FailedProbe, HandoffReport, MeasuredPair, RefusedLink
from baton.node.attempts.attempt_times import TransferFigures
from baton.node.kv.connector import BothHalves
from baton.node.kv.intake import Intake
from baton.node.kv.intake_connector import IntakeConnector
from baton.node.kv.offer_connector import OfferConnector
from baton.node.kv.offering import Offering
from baton.node.kv.shared_mover import SharedMover
from baton.node.reports.figures import KV_FETCH_HELP
from baton.node.role import RoleContext, Servicer
from baton.observe.metrics import Distribution, Figure, by_label, declared_figures
from baton.runner.blocks.block_digests import block_digests
from baton.wire.liveness import PeerAccess, is_running
from kv_transfer.backends.base import TransferBackend
from kv_transfer.backends.nixl import NixlBackend
from kv_transfer.backends.ucx_lanes import lane_of_reads
from kv_transfer.digests import digest_every
from kv_transfer.figures import (
    failure_figures,
    handshake_figures,
    pair_figures,
    probe_figures,
    read_figures,
    refusal_figures,
    transfer_figures,
)
from kv_transfer.layout import PROTOCOL_VERSION, LayoutFingerprint, LinkIdentity
from kv_transfer.mover.mover import Mover
from kv_transfer.mover.part_mover import DeliverEvent
from kv_transfer.mover.parts_mover import PartsMover, digests_of_node, mover_of_node
from kv_transfer.receiver.join_probe import JoinProbes
from kv_transfer.receiver.transfer import TransferBook
from kv_transfer.sender.lease_values import LeaseTimes


class KvRole:
    """The part of a `NodeRole` that is the same for all roles. A role adds which peers it meets before it needs them,
    and what an abort means."""

    def __init__(
        self,
        context: RoleContext,
        make_backend: Callable[[RoleContext, str], TransferBackend],
        protocol: int = PROTOCOL_VERSION,
    ) -> None:
        """`make_backend` makes a transfer agent of a name. `protocol`: the version of the link's protocol; tests pass
        other versions."""
        runner, config = context.runner, context.config
        across = config.pair_across_numerics
        layout = LayoutFingerprint.of(runner.model, runner.layout, NixlBackend.name, across=across)
        identity = LinkIdentity(config.cluster, config.node_id, context.incarnation, layout, context.address, protocol)
        self._identity = identity
        every = digest_every(config.kv_digests)
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

        mover = SharedMover(make_mover)
        self.offering = Offering(
            identity,
            runner.memory,
            mover.of_sender,
            context.tell_engine,
            context.record,
            context.clock,
            LeaseTimes(unclaimed_s=config.kv_unclaimed_s),
            digests=digests_of_node(runner, lambda: self.offering.mover.parts) if every else None,
            digest_every=every,
            is_running=partial(is_running, dialer=context.dialer),
        )
        self.intake = Intake(
            identity,
            mover.of_reader,
            TransferBook(
                digest_every=every,
                keeps_valid_blocks=config.on_transfer_failure == "recompute",
                clock=context.clock,
                vocab_size=runner.model.vocab_size,
            ),
            JoinProbes(identity.node_id, identity.incarnation, context.clock, memory_kind=runner.memory.kind),
            context.tell_engine,
            context.record,
            context.post,
            context.clock,
            PeerAccess.of(context.dialer),
            runner.layout,
            lane=lane_of_reads,
        )
        self._reading = IntakeConnector(self.intake, runner.layout, context.post)
        self._connector = BothHalves(
            OfferConnector(self.offering, runner.layout, context.post_after_step, context.post, context.after_step),
            self._reading,
        )

    @property
    def connector(self) -> BothHalves:
        return self._connector

    @property
    def identity(self) -> LinkIdentity:
        """How this node introduces itself to others."""
        return self._identity

    @property
    def link_protocol(self) -> int:
        return self._identity.protocol

    @property
    def servicers(self) -> Sequence[Servicer]:
        return (self.offering,)

    @property
    def handoff(self) -> KvRole:
        return self

    async def start(self) -> None:
        await self.offering.start()
        await self.intake.start()

    def serving(self) -> None:
        return

    async def stop(self) -> None:
        await self.intake.stop()
        await self.offering.stop()

    def attempt_aborted(self, attempt: AttemptKey) -> None:
        self.intake.abandon(attempt)
        if self.offering.knows(attempt):
            self.offering.aborted(attempt)

    def move_asked(self, to: AttemptKey, holder: str) -> None:
        self.offering.move_asked(to, holder)

    def attempt_timed(self, attempt: AttemptKey, timings: StageTimings) -> None:
        self.offering.timed(attempt, timings)

    def transfer_figures(self, attempt: AttemptKey) -> TransferFigures | None:
        stats = self._reading.stats(attempt)
        if stats is None:
            return None
        return TransferFigures(stats.num_bytes, stats.read_s * 1e3, self.intake.prompt_timings(attempt))

    def arrived_tokens(self, attempt: AttemptKey) -> Sequence[int]:
        return self.intake.arrived_tokens(attempt)

    # The node's end of its hand-offs.

    def report(self) -> HandoffReport:
        reading, offering = self.intake.report(), self.offering.report()
        return replace(
            reading,
            open=[*offering.open, *reading.open],
            refused_links=self.refused_links(),
            failed_probes=self.failed_probes(),
        )

    def refused_links(self) -> Sequence[RefusedLink]:
        both = {link.peer: link for half in (self.offering, self.intake) for link in half.refused_links()}
        return sorted(both.values(), key=lambda link: link.age_s)

    def failed_probes(self) -> Sequence[FailedProbe]:
        both = {probe.peer: probe for half in (self.offering, self.intake) for probe in half.failed_probes()}
        return sorted(both.values(), key=lambda probe: -probe.age_s)

    def slow_pairs(self) -> Sequence[MeasuredPair]:
        return self.intake.slow_pairs()

    def figures(self) -> Sequence[Figure | Distribution]:
        intake, offering = self.intake, self.offering
        counts = intake.counts()
        stages = {"waiting_to_start": counts.waiting_to_start, "in_progress": counts.in_progress}
        return [
            *by_label("num_requests_kv_fetch_by_stage", KV_FETCH_HELP, "stage", stages),
            *failure_figures(intake.book.failures),
            *read_figures(intake.book.read_histograms),
            *handshake_figures(intake.links.handshakes),
            *transfer_figures(intake.report()),
            *declared_figures(offering.stats()),
            *refusal_figures(self.refused_links()),
            *pair_figures(intake.probes.rates.shown()),
            *probe_figures(Counter(offering.probes.outcomes) + intake.probes.outcomes, self.failed_probes()),
        ]
