"""Turns the engine's figures and the node's description into what routers and the registry are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from baton.engine.batch import ComputedStep, SchedulerStats
from baton.engine.scheduler import Scheduler
from baton.messages.node import LoadReport, NodeDescription, StepFigures
from baton.messages.node_report import KV_PROBE_FAILED, FailedProbe, RefusedLink
from baton.registry import NodeRecord

_REFUSAL_SHOWN_S = 300.0
"""How long routers are told of a refused link."""


def step_figures(step: ComputedStep) -> StepFigures:
    """The figures of a step, from which routers learn the node's rates."""
    return StepFigures(
        step_ms=step.seconds * 1e3,
        prefill_tokens=step.num_prefill_tokens,
        decode_sequences=step.num_decodes,
        decode_context_tokens=step.num_decode_context_tokens,
        drafts=step.num_drafts,
        draft_tokens=step.num_draft_tokens,
        accepted_tokens=step.num_accepted_tokens,
    )


def load_report(stats: SchedulerStats, *, draining: bool = False) -> LoadReport:
    """The node's load, as routers are told it."""
    return LoadReport(
        running=stats.num_running,
        waiting=stats.num_waiting - stats.num_waiting_for_remote_kvs,
        waiting_for_remote_kvs=stats.num_waiting_for_remote_kvs,
        total_blocks=stats.total_blocks,
        free_blocks=stats.free_blocks,
        leased_blocks=stats.leased_blocks,
        quarantined_blocks=stats.quarantined_blocks,
        draining=draining,
        uncomputed_tokens=stats.num_uncomputed_tokens,
        context_tokens=stats.num_context_tokens,
    )


def load_of(scheduler: Scheduler, *, draining: bool = False) -> LoadReport:
    """The same as `load_report(scheduler.make_stats())`, for callers that ask thousands of times a second."""
    pool = scheduler.kv_cache_manager.pool
    num_running, num_waiting = scheduler.get_request_counts()
    num_uncomputed_tokens, num_context_tokens = scheduler.num_uncomputed_and_context_tokens()
    num_remote = scheduler.num_waiting_for_remote_kvs
    return LoadReport(
        num_running,
        num_waiting - num_remote,
        num_remote,
        pool.num_total_blocks,
        pool.num_free_blocks,
        pool.num_leased_blocks,
        pool.num_quarantined_blocks,
        draining,
        num_uncomputed_tokens,
        num_context_tokens,
    )


def handoff_notice(refused_links: Sequence[RefusedLink], failed_probes: Sequence[FailedProbe]) -> str:
    """The first of the failed probes and the number of the others; if there are none, why the latest link was refused,
    if that was in the last minutes; otherwise empty.

    Each new text is an event of the cluster. So this one stays the same while several pairs fail by turns.
    """
    if failed_probes:
        others = len(failed_probes) - 1
        more = f" (and {others} more pair{'s' if others > 1 else ''})" if others else ""
        return f"{KV_PROBE_FAILED}: {failed_probes[0].detail}{more}"
    return next((link.story for link in refused_links if link.age_s < _REFUSAL_SHOWN_S), "")


def node_record(node: NodeDescription, started_at: float, lease_s: float, start_number: int = 0) -> NodeRecord:
    """A node's record in the registry. `started_at`: seconds on the wall clock."""
    return NodeRecord(
        name=node.node_id,
        role=node.role.value,
        started_at=started_at,
        lease_s=lease_s,
        start_number=start_number,
        **{name: getattr(node, name) for name in _IN_BOTH},
    )


_IN_BOTH = ({one.name for one in fields(NodeDescription)} & {one.name for one in fields(NodeRecord)}) - {"role"}
