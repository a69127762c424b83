"""Describes an engine as a node's welcome to routers does."""

from __future__ import annotations

import os

from baton import __version__
from baton.config import NodeConfig
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.runner import ModelRunner
from baton.messages.capabilities import Capability
from baton.messages.node import NodeDescription, Role


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
    )
