"""What stands for attention while a module is called to find out what it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from baton.engine.runner import LayerGeometry, LayerState
from baton.runner.model.attention import AttentionParameters, KeyScores, UnsupportedAttention
from baton.runner.model.states.keepers import EchoStates, ProbeStates


@dataclass(slots=True)
class ProbeAttention:
    """Computes no attention, but records the geometry and the window of each layer that calls it.

    Raises UnsupportedAttention for a layer that calls it twice.
    """

    layers: dict[int, LayerGeometry] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    have_sinks: bool = False
    """Whether any layer has attention sinks."""
    states: ProbeStates = field(default_factory=ProbeStates)

    def found(self) -> dict[int, tuple[LayerGeometry | LayerState, ...]]:
        """What each layer that called has in the cache: keys, a state, or keys and then a state."""
        every = sorted(self.layers.keys() | self.states.layers.keys())
        kinds: tuple[Mapping[int, LayerGeometry | LayerState], ...] = (self.layers, self.states.layers)
        return {index: tuple(kind[index] for kind in kinds if index in kind) for index in every}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        how: AttentionParameters,
        *,
        sampling: bool = False,
        stores: bool = True,
        selected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if layer in self.layers and stores:
            raise UnsupportedAttention(
                f"its layer {layer} computes attention twice in a step, and the cache has room for one key and value "
                "of each token"
            )
        self.windows[layer] = how.window
        self.have_sinks |= how.sinks is not None
        self.layers[layer] = LayerGeometry(how.num_kv_heads, key.shape[2], value.shape[2], how.values_in_keys)
        return query.new_zeros(*query.shape[:2], value.shape[2])

    def select(self, layer: int, key: torch.Tensor, scores: KeyScores, *, sampling: bool = False) -> torch.Tensor:
        return no_selection(scores)


def no_selection(scores: KeyScores) -> torch.Tensor:
    """The selection of rows that attend to nothing, since they are only looked at."""
    return torch.zeros(scores.query.shape[0], 0, dtype=torch.int64, device=scores.query.device)


class EchoAttention:
    """Returns a mix of each row's own query, key and value, and records its arguments: for comparing two modules."""

    def __init__(self, query_factor: float = 1.0, key_factor: float = 1.0) -> None:
        """`query_factor`, `key_factor`: what queries and keys are multiplied with first."""
        self._query_factor, self._key_factor = query_factor, key_factor
        self.seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.states = EchoStates()
        self.how: AttentionParameters | None = None

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        how: AttentionParameters,
        *,
        sampling: bool = False,
        stores: bool = True,
        selected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query, key = query * self._query_factor, key * self._key_factor
        self.seen.append((query, key, value.clone()))
        self.how = how
        mixed = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        width = min(query.shape[2], value.shape[2])
        mixed[..., :width] += query[..., :width]
        mixed[..., :width] -= key[..., :width].repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        return mixed

    def select(self, layer: int, key: torch.Tensor, scores: KeyScores, *, sampling: bool = False) -> torch.Tensor:
        return no_selection(scores)
