"""Counts a model's work: the bytes that a decode step has to read, and the operations that a prompt needs.

The numbers come from names and shapes of the parameters alone, independently of the code that is measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from baton.engine.runner import ELEMENT_BYTES, KVLayout, LayerState
from baton.runner.model.checkpoint import open_checkpoint

_TABLES = re.compile("(?<!un)embed|wte|wpe")
"""In names of weights that are looked up, not multiplied."""
_OF_ONE_LAYER = "adapter_list"
"""In names of weights of a shared part that each layer has for itself (zamba2)."""
_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Numbers of parameters by how a step uses them."""

    dense: int
    """Parameters that every step multiplies with, except for the head."""
    head: int
    """Parameters of the product that gives logits."""
    looked_up: int
    """Parameters of tables of which a step reads a few rows: embeddings, unless their table is the head, too."""
    experts: int
    """Parameters of all experts together."""
    num_experts: int
    experts_per_token: int
    shapes: frozenset[tuple[int, int]]
    """[n, k] of every product."""
    repeated: int = 0
    """How many of `dense` are multiplied with once more, each time by another layer that shares them."""
    of_last_token: int = 0
    """How many of `dense` only a prompt's last token is multiplied with: the parameters of the last layers, if these
    have no keys of their own."""

    @property
    def multiplied(self) -> int:
        """Parameters of all products together."""
        return self.dense + self.head + self.experts

    def bytes_read(self, width: float, cache_bytes: float, batch: int) -> float:
        """The fewest bytes that a decode step has to read: weights once, and what every request has in the cache.

        Those that several layers share count for each of them, since no cache keeps them until the next one. Of the
        experts, the share counts that `batch` random rows are expected to be routed to. `width`: bytes of a parameter,
        on average where some are packed. `cache_bytes`: those that a step reads of one request (`cache_bytes_read`).
        """
        weights = self.dense + self.repeated + self.head + self.experts * self._share_of_experts(batch)
        return weights * width + batch * cache_bytes

    def prompt_operations(self, tokens: int) -> float:
        """Multiplications and additions with weights for one prompt; logits are computed for its last token alone."""
        share = self.experts_per_token / self.num_experts if self.num_experts else 0.0
        of_all = self.dense + self.repeated - self.of_last_token + self.experts * share
        return 2 * (tokens * of_all + self.of_last_token + self.head)

    def _share_of_experts(self, rows: int) -> float:
        """Expected share of the experts that at least one row is routed to, with random routing."""
        if not self.num_experts:
            return 0.0
        return 1 - (1 - self.experts_per_token / self.num_experts) ** rows


def cache_bytes_read(layout: KVLayout, context_tokens: float) -> float:
    """Bytes of the cache that a decode step reads of one request: the keys and values that it sees, or the states."""
    total = 0.0
    for group in layout.groups:
        tokens = context_tokens if group.window is None else min(context_tokens, group.window)
        for index in group.layers:
            layer = layout.layers[index]
            num_bytes = layout.layer_elements(index) * ELEMENT_BYTES[layout.dtype]
            total += num_bytes if isinstance(layer, LayerState) else num_bytes / layout.block_size * tokens
    return total


def attention_operations(tokens: int, width: float) -> float:
    """Multiplications and additions of causal attention over one prompt.

    `width`: elements of keys and values of one token, summed over layers and query heads.
    """
    return tokens * (tokens + 1) / 2 * width * 2


def work_of(
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    further_uses: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> ModelWork:
    """Counts the work from a config.json and the shapes of all parameters by name.

    `further_uses`: further names of those that several parts share.
    """
    dense, head, table, tables, experts, of_last = 0, 0, 0, 0, 0, 0
    products: set[tuple[int, int]] = set()
    num_without_keys = int(config.get("num_kv_shared_layers") or 0)
    first_without_keys = int(config.get("num_hidden_layers") or 0) - num_without_keys
    for name, shape in shapes.items():
        before, layer = dense, _LAYER.search(name)
        if len(shape) < 2:
            dense += prod(shape)
        elif name.startswith("lm_head"):
            head += prod(shape)
            products.add((shape[0], shape[1]))
        elif _TABLES.search(name):
            is_head = shape == (config.get("vocab_size"), config.get("hidden_size", shape[1]))
            table, tables = max(table, prod(shape) if is_head else 0), tables + prod(shape)
        elif len(shape) == 3 and shape[1] == 1:
            dense += prod(shape)  # a convolution of each column
        elif len(shape) == 3 or ".experts." in name:
            experts += prod(shape)
            products.add((shape[-2], shape[-1]))
        else:
            dense += prod(shape)
            products.add((shape[0], shape[1]))
        if num_without_keys and layer is not None and int(layer[1]) >= first_without_keys:
            of_last += dense - before
    shared = [prod(shape) for name, shape in further_uses.items() if _LAYER.search(name) and _OF_ONE_LAYER not in name]
    return ModelWork(
        dense=dense,
        repeated=sum(shared),
        # Without a head of its own a model multiplies with its embedding table.
        head=head or table,
        looked_up=tables if head else tables - table,
        experts=experts,
        num_experts=_first_of(config, _NUMBERS_OF_EXPERTS) if experts else 0,
        experts_per_token=_first_of(config, _EXPERTS_PER_TOKEN) or 1,
        shapes=frozenset(products),
        of_last_token=of_last,
    )


def _first_of(config: Mapping[str, Any], names: Iterable[str]) -> int:
    """The first of these numbers that a configuration has, or 0."""
    return next((int(config[name]) for name in names if config.get(name)), 0)


def read_work(model_dir: Path) -> ModelWork:
    """Counts the work of a model directory, whatever the format of its weights; raises ConfigError."""
    from baton.runner.model.weights import parameter_shapes

    checkpoint = open_checkpoint(model_dir)
    return work_of(checkpoint.config, *parameter_shapes(checkpoint))
