"""The card of the model that is served: what requests are checked against, and what /v1/models shows.

A router has it from the model directory until nodes are attached, and then from what they report. Offline use has it
from its one engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from baton.config import RouterConfig
from baton.messages.adapters import AdapterSource
from baton.messages.generation import ModelCard
from baton.messages.node import NodeDescription
from baton.messages.node_model import Capability
from baton.messages.pooling import NO_POOLING_FILES, ModelPooling
from baton.messages.sampling import SamplingDefaults
from baton.runner.model.pooling_files import read_pooling
from baton.runner.spec import SimulatedSpec
from baton.text.model_files import read_model_files, read_sampling_defaults
from router.placement.versions import version_of
from router.placement.view import ClusterView


class CurrentCard:
    """A router's card: `known` until nodes of this model are attached, then made of their descriptions."""

    def __init__(
        self,
        known: ModelCard,
        view: ClusterView,
        now: Callable[[], float],
        not_allowed: frozenset[Capability] = frozenset(),
    ) -> None:
        """`now`: seconds on the view's clock. `not_allowed`: what this router takes no requests for."""
        self._not_allowed = not_allowed
        self._view = view
        self._now = now
        self._known = known
        self._of: Sequence[NodeDescription] = ()
        """The descriptions from which the card was made."""

    def __call__(self) -> ModelCard:
        served_by = self._view.served_by()
        if served_by is self._of:
            return self._known  # called for every request
        self._of = served_by
        nodes = [node for node in served_by if node.model == self._known.name]
        if nodes:
            # With nodes that left a short time ago: a request that needs one is told to come again, and not refused.
            longest = max(size.max_model_len for size in self._view.sizes(self._now()) if size.model == nodes[0].model)
            known = self._known
            card = card_of_nodes(
                nodes, longest, known.defaults, permits_extra_keys=known.permits_extra_keys, pooling=known.pooling
            )
            allowed = card.capabilities - self._not_allowed
            self._known = replace(card, adapters=known.adapters, capabilities=allowed, source=known.source)
        return self._known

    def set_adapters(self, adapters: Mapping[str, AdapterSource]) -> None:
        """Take the adapters that clients may name from now on, by name."""
        self._known = replace(self._known, adapters=adapters)


def card_of_nodes(
    nodes: Sequence[NodeDescription],
    max_model_len: int,
    defaults: SamplingDefaults,
    *,
    permits_extra_keys: bool = False,
    pooling: ModelPooling = NO_POOLING_FILES,
) -> ModelCard:
    """The card of the model that these nodes serve; there is at least one, and all serve the same model."""
    return ModelCard(
        nodes[0].model,
        max_model_len,
        min(node.vocab_size for node in nodes),
        has_end=all(node.eos_token_ids for node in nodes),
        embedding_size=max(node.embedding_size for node in nodes),
        fingerprint=_fingerprint(nodes),
        defaults=defaults,
        permits_extra_keys=permits_extra_keys,
        row_width=max(node.row_width for node in nodes),
        capabilities=frozenset().union(*(node.can for node in nodes)),
        pooling=pooling,
    )


def _fingerprint(nodes: Sequence[NodeDescription]) -> str:
    """The bits that these nodes compute, whatever their number and order; empty if one promises no bits."""
    if not all(node.bit_exact for node in nodes):
        return ""
    of_each = sorted({node.bits for node in nodes})
    if len({version_of(node, across=True) for node in nodes}) < len(of_each):
        return ""  # Nodes that pair across numerics: an answer's tokens depend on which of them it gets.
    return "fp_" + (of_each[0] if len(of_each) == 1 else hashlib.sha256("\n".join(of_each).encode()).hexdigest()[:12])


def card_without_nodes(config: RouterConfig) -> ModelCard:
    """The card from the model directory; raises ConfigError if that can't be read."""
    if config.runner == "simulated":
        simulated = SimulatedSpec()
        return ModelCard(config.model_name or simulated.name, simulated.max_model_len, simulated.vocab_size)
    files, pooling = read_model_files(config.model), read_pooling(config.model)
    return ModelCard(
        config.served_model_name,
        pooling.max_length or files.max_model_len,
        files.vocab_size,
        bool(files.eos_token_ids),
        defaults=sampling_defaults(config.model, config.generation_config),
        permits_extra_keys=config.json_extra_keys == "allow",
        pooling=pooling,
        source=files.source,
    )


def sampling_defaults(model: Path, generation_config: Literal["auto", "none"]) -> SamplingDefaults:
    """What requests sample with that do not say: auto: what the model directory recommends; none: nothing of it."""
    return read_sampling_defaults(model) if generation_config == "auto" else SamplingDefaults()
