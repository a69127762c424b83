"""The card of the model that the cluster serves: what requests are checked against, and /v1/models shows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.config import RouterConfig
from baton.messages.generation import ModelCard
from baton.messages.node import NodeDescription
from baton.messages.sampling import SamplingDefaults
from baton.runner.spec import SimulatedSpec
from baton.text.model_files import read_model_files, read_sampling_defaults
from router.placement.view import ClusterView


class CurrentCard:
    """The model's card: known from the model directory until nodes are attached, then from their descriptions."""

    def __init__(self, known: ModelCard, view: ClusterView, now: Callable[[], float]) -> None:
        """`now`: seconds on the view's clock."""
        self._view = view
        self._now = now
        self._known = known
        self._of: Sequence[NodeDescription] = ()
        """The descriptions from which the card was made."""

    def __call__(self) -> ModelCard:
        descriptions = self._view.descriptions()
        if descriptions is self._of:
            return self._known  # called for every request
        self._of = descriptions
        nodes = [node for node in descriptions if node.model == self._known.name]
        if nodes:
            # With nodes that left a short time ago: a request that needs one is told to come again, and not refused.
            longest = max(size.max_model_len for size in self._view.sizes(self._now()) if size.model == nodes[0].model)
            vocab_size, has_end = min(node.vocab_size for node in nodes), all(node.eos_token_ids for node in nodes)
            width = max(node.embedding_size for node in nodes)
            self._known = replace(
                self._known,
                max_model_len=longest,
                vocab_size=vocab_size,
                has_end=has_end,
                embedding_size=width,
                fingerprint=_fingerprint(nodes),
            )
        return self._known


def _fingerprint(nodes: Sequence[NodeDescription]) -> str:
    """A name for all that decides on the bits that these nodes compute, whatever their number and their order."""
    told = sorted({f"{node.model_fingerprint} {node.dtype} {node.numerics}" for node in nodes})
    return "fp_" + hashlib.sha256("\n".join(told).encode()).hexdigest()[:12]


def card_without_nodes(config: RouterConfig) -> ModelCard:
    if config.runner == "simulated":
        simulated = SimulatedSpec()
        return ModelCard(config.model_name or simulated.name, simulated.max_model_len, simulated.vocab_size)
    files = read_model_files(config.model)
    from_model = config.generation_config == "auto"
    return ModelCard(
        config.served_model_name,
        files.max_position_embeddings,
        files.vocab_size,
        bool(files.eos_token_ids),
        defaults=read_sampling_defaults(config.model) if from_model else SamplingDefaults(),
        permits_extra_keys=config.json_extra_keys == "allow",
    )
