"""Chooses which plain weights of a checkpoint are quantised while it is loaded (`--quantization`).

Linear layers, experts, and an embedding that is also the head are. The head always gets 8 bits: its errors go straight
into the choice of the next token, and with 4 bits they are seen. Norms, biases, embeddings that share nothing, the
routers of mixtures, gates of a few outputs, and rows that groups do not divide stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.runner.backends.quantized_weight import QuantizedWeight
from baton.runner.model.checkpoint_names import CheckpointNames
from baton.runner.model.held_weights import FoundWeight, HeldWeights, hold_weights, shared_with_the_head
from baton.runner.model.quantization.quantize import GROUP, Quantization, bits_of, quantized
from baton.runner.model.quantization.stored_weight import (
    CheckpointTensor,
    StoredWeight,
    UnusableWeight,
    packed_bytes,
)

_FEWEST_OUTPUTS = 16
_HEAD_BITS = 8
_SCALE_BYTES = 2


def weights_to_quantize(
    skeleton: Any, names: CheckpointNames, plain: Mapping[str, CheckpointTensor], quantization: Quantization
) -> HeldWeights:
    """Choose among the `plain` tensors of a checkpoint; `skeleton` is the model on the meta device."""
    heads = _heads(skeleton) | shared_with_the_head(skeleton, names, plain)

    def store(found: FoundWeight) -> StoredWeight | None:
        n, k = found.shape
        if n < _FEWEST_OUTPUTS or k == 0 or k % GROUP:
            return None
        bits = _HEAD_BITS if found.key in heads else bits_of(quantization)

        def read() -> QuantizedWeight:
            weight = found.view(found.tensor.read())
            try:
                return quantized(weight.contiguous(), bits)
            except UnusableWeight as error:
                raise UnusableWeight(f"{found.name} {error}") from error

        return StoredWeight(found.shape, read, packed_bytes(found.shape, bits, GROUP, _SCALE_BYTES))

    return hold_weights(skeleton, names, plain, store, embeddings=False)


def _heads(skeleton: Any) -> set[str]:
    """The names of the head's weight."""
    head = skeleton.get_output_embeddings()
    return {f"{path}.weight" for path, part in skeleton.named_modules() if part is head and head is not None}
