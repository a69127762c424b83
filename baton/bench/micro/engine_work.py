"""How much work a model is: the bytes that a decode step must read, the operations that a prompt must cost.

Counted from names and shapes of the weights alone, so nothing of what is measured is in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from baton.runner.model.checkpoint import open_checkpoint

_TABLES = ("embed", "wte", "wpe")
"""Names of weights that are looked up, not multiplied."""


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Parameters of a model by how a step uses them."""

    dense: int
    """In every product of every step, the head aside."""
    head: int
    """In the product that gives logits."""
    experts: int
    """Of all experts together."""
    num_experts: int
    experts_per_token: int
    shapes: frozenset[tuple[int, int]]
    """[n, k] of every product."""

    def bytes_read(self, width: int, kv_bytes_per_token: int, context_tokens: float, batch: int) -> float:
        """Least bytes of one decode step: weights once (of the experts those that so many rows are expected to hit),
        and the keys and values of every request's context once. `width` is a parameter's."""
        weights = self.dense + self.head + self.experts * self._hit(batch)
        return weights * width + batch * context_tokens * kv_bytes_per_token

    def prompt_operations(self, tokens: int) -> float:
        """Multiplications and additions with weights for one prompt; logits for its last token alone."""
        share = self.experts_per_token / self.num_experts if self.num_experts else 0.0
        return 2 * (tokens * (self.dense + self.experts * share) + self.head)

    def _hit(self, rows: int) -> float:
        """Share of the experts that at least one of the rows is sent to, were they sent at random."""
        if not self.num_experts:
            return 0.0
        return 1 - (1 - self.experts_per_token / self.num_experts) ** rows


def attention_operations(tokens: int, width: float) -> float:
    """Multiplications and additions of causal attention over one prompt.

    `width`: elements of keys and values of one token, summed over layers and query heads.
    """
    return tokens * (tokens + 1) / 2 * width * 2


def work_of(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelWork:
    """From a config.json and every weight's shape by name."""
    dense, head, table, experts = 0, 0, 0, 0
    products: set[tuple[int, int]] = set()
    for name, shape in shapes.items():
        if len(shape) < 2:
            dense += prod(shape)
        elif name.startswith("lm_head"):
            head += prod(shape)
            products.add((shape[0], shape[1]))
        elif any(word in name for word in _TABLES):
            table = max(table, prod(shape) if shape[0] == config.get("vocab_size") else 0)
        elif len(shape) == 3 or ".experts." in name:
            experts += prod(shape)
            products.add((shape[-2], shape[-1]))
        else:
            dense += prod(shape)
            products.add((shape[0], shape[1]))
    count = next((config[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in config), 0)
    return ModelWork(
        dense=dense,
        # Without a head of its own a model multiplies with its embedding table.
        head=head or table,
        experts=experts,
        num_experts=int(count) if experts else 0,
        experts_per_token=int(config.get("num_experts_per_tok") or 1),
        shapes=frozenset(products),
    )


def read_work(model_dir: Path) -> ModelWork:
    """The same from a model directory; raises ConfigError."""
    checkpoint = open_checkpoint(model_dir)
    return work_of(checkpoint.config, dict(_shapes(checkpoint.weight_files)))


def _shapes(files: Iterable[Path]) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Every tensor's shape, from the headers alone (`open_checkpoint` has found them sound)."""
    for path in files:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, tuple(entry["shape"])
