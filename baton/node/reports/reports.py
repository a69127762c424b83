"""What a node tells routers and the registry: its description, its load, results, and changes of its prefix cache."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import fields

from baton import __version__
from baton.config import NodeConfig
from baton.engine.batch import EngineCoreOutput, SchedulerStats
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.kv_cache.events import KVEventBatch, KVSnapshot
from baton.engine.runner import ModelRunner
from baton.engine.scheduler import Scheduler
from baton.errors import InvalidRequest
from baton.messages.kv_cache import BlockStored, KVCacheUpdate
from baton.messages.node import LoadReport, NodeDescription, RequestDelta, Role, StageTimings
from baton.messages.node_model import Capability
from baton.messages.node_report import KV_PAIR_SLOW, KV_PROBE_FAILED, FailedProbe, MeasuredPair, RefusedLink
from baton.registry import NodeRecord


def describe(
    config: NodeConfig,
    runner: ModelRunner,
    incarnation: str,
    key_fields: CacheKeyFields,
    max_model_len: int,
    *,
    address: str = "",
    link_protocol: int = 0,
) -> NodeDescription:
    """The description of one incarnation. `address`: where routers and nodes reach it; empty: it has no ports."""
    model, layout = runner.model, runner.layout
    return NodeDescription(
        node_id=config.node_id,
        incarnation=incarnation,
        role=Role(config.role),
        address=address,
        pid=os.getpid(),
        version=__version__,
        model=model.name,
        model_fingerprint=model.fingerprint,
        dtype=model.dtype,
        numerics=model.numerics,
        bit_exact=model.bit_exact,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        block_size=layout.block_size,
        num_blocks=runner.memory.num_blocks,
        eos_token_ids=model.eos_token_ids,
        on_transfer_failure=config.on_transfer_failure,
        kv_layout=key_fields.layout,
        block_bytes=layout.block_bytes * len(layout.groups),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        link_protocol=link_protocol,
        embedding_size=model.embedding_size,
        num_threads=config.num_threads if runner.memory.kind == "DRAM" else 0,
        tp=config.tp,
        pp=config.num_stages,
        capabilities=model.capabilities if config.num_encoder_rows else model.capabilities - {Capability.IMAGE},
        row_width=model.row_width,
        most_short_tokens=model.long_sequences.most_short if model.long_sequences is not None else 0,
        bit_exact_reason=model.bit_exact_reason,
        is_verified=model.is_verified,
        why_unverified=model.why_unverified,
        model_type=model.model_type,
        kv_groups=len(layout.groups),
        row_numerics=model.row_numerics,
        takes_moves=link_protocol > 0 and Capability.GENERATE in model.capabilities,
        kv_shape=layout.exchange_shape if link_protocol and config.pair_across_numerics else "",
    )


_REFUSAL_SHOWN_S = 300.0
"""How long routers are told of a refused link."""


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
        promised_blocks=stats.promised_blocks,
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
        scheduler.num_promised_blocks,
    )


def handoff_notice(
    refused_links: Sequence[RefusedLink],
    failed_probes: Sequence[FailedProbe],
    slow_pairs: Sequence[MeasuredPair] = (),
) -> str:
    """The first of the failed probes and the number of the others; if there are none, why the latest link was refused,
    if that was in the last minutes; otherwise the first pair of GPUs that is slow, or empty.

    Each new text is an event of the cluster. So this one stays the same while several pairs fail by turns.
    """
    if failed_probes:
        others = len(failed_probes) - 1
        more = f" (and {others} more pair{'s' if others > 1 else ''})" if others else ""
        return f"{KV_PROBE_FAILED}: {failed_probes[0].detail}{more}"
    refusals = [link.story for link in refused_links if link.age_s < _REFUSAL_SHOWN_S]
    return next(iter([*refusals, *(f"{KV_PAIR_SLOW}: {pair.why_slow}" for pair in slow_pairs)]), "")


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


_PART_BYTES = 4 << 20
"""About how many bytes of embeddings and of prompts' log-probabilities one report holds: a router takes no message of
more than 16 MiB."""
_LOGPROB_BYTES = 11
"""About the bytes of one log-probability in a message."""


def request_delta(
    output: EngineCoreOutput,
    timings: StageTimings | None = None,
    prompt_timings: StageTimings | None = None,
) -> RequestDelta:
    """The delta of one output of the engine."""
    refusal = output.error if isinstance(output.error, InvalidRequest) else None
    return RequestDelta(
        output.attempt,
        output.first_index,
        output.new_token_ids,
        output.new_logprobs,
        output.outcome,
        output.stop_reason,
        str(output.error or "") if refusal is None else refusal.reason,
        timings,
        output.sequence_index,
        output.transfer_cause,
        output.embedding,
        prompt_logprobs=output.prompt_logprobs,
        draft_counts=output.draft_counts,
        prompt_timings=prompt_timings,
        error_field="" if refusal is None else refusal.field,
    )


def split_by_size(deltas: Sequence[RequestDelta]) -> list[Sequence[RequestDelta]]:
    """Divide deltas among reports, so that no report is too large; at least one report."""
    if sum(map(_num_bytes, deltas)) <= _PART_BYTES:
        return [deltas]
    parts: list[Sequence[RequestDelta]] = []
    part: list[RequestDelta] = []
    size = 0
    for delta in deltas:
        num_bytes = _num_bytes(delta)
        if part and size + num_bytes > _PART_BYTES:
            parts.append(part)
            part, size = [], 0
        part.append(delta)
        size += num_bytes
    return [*parts, part]


def _num_bytes(delta: RequestDelta) -> int:
    """About the bytes of what may be large in a delta."""
    positions = delta.prompt_logprobs
    return len(delta.embedding) + (len(positions) * (2 + len(positions[0].top)) * _LOGPROB_BYTES if positions else 0)


_MAX_HASHES = 100_000
"""The most hashes in one update: 3.4 MB, well below the largest message that gRPC takes."""


def kv_cache_updates(news: KVEventBatch | KVSnapshot, max_hashes: int = _MAX_HASHES) -> Sequence[KVCacheUpdate]:
    """The updates to send, in order; a large snapshot is divided among several."""
    if isinstance(news, KVEventBatch):
        return [KVCacheUpdate(news.next_sequence - len(news.events), news.next_sequence, news.events)]
    number = news.next_sequence
    first, *others = [[event] for event in _stored(news, max_hashes)] or [[]]
    return [
        KVCacheUpdate(number, number, first, restart=True),
        *(KVCacheUpdate(number, number, events) for events in others),
    ]


def _stored(snapshot: KVSnapshot, max_hashes: int) -> Iterator[BlockStored]:
    for tier, stored in snapshot.block_hashes.items():
        hashes = list(stored)
        for start in range(0, len(hashes), max_hashes):
            yield BlockStored(hashes[start : start + max_hashes], tier=tier)
