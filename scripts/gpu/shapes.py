"""The shapes of models that `scripts/gpu_check` measures, and weights that a counter makes on the device itself.

A number of a weight is a function of the weight's name and the number's place alone, and made by integer arithmetic. So
a model has the same weights on every device and in every process, and no checkpoint of gigabytes is written or carried.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_CHUNK = 1 << 24
"""How many numbers are made at a time, so that their counters take 128 MiB."""
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The constants of SplitMix64 (Steele et al., "Fast Splittable Pseudorandom Number Generators")."""
_DEVIATION = 0.02
"""The standard deviation of weights, as transformers initialises a llama."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [outputs, inputs]. `kind`: plain, gated (the outputs are gates and ups) or float32 (logits)."""

    name: str
    outputs: int
    inputs: int
    kind: str = "plain"


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a llama."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_tokens: int
    is_tied: bool = False
    """Whether the head's weight is the embedding's."""

    @property
    def config(self) -> dict[str, Any]:
        """What its config.json holds."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_tokens,
            "tie_word_embeddings": self.is_tied,
        }

    @property
    def num_weights(self) -> int:
        """How many numbers its weights have, norms apart."""
        per_layer = sum(matrix.outputs * matrix.inputs for matrix in self.matrices() if matrix.name != "head")
        return self.layers * per_layer + self.vocab * self.hidden * (1 if self.is_tied else 2)

    @property
    def kv_elements(self) -> int:
        """How many numbers of keys and values a token has in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def matrices(self, parts: int = 1) -> list[Matrix]:
        """The weights of a layer and the head; with `parts` the columns of one of so many ranks."""
        queries = self.heads * self.head_dim
        return [
            Matrix("qkv", (queries + 2 * self.kv_heads * self.head_dim) // parts, self.hidden),
            Matrix("o", self.hidden // parts, queries),
            Matrix("gate_up", 2 * self.intermediate // parts, self.hidden, "gated"),
            Matrix("down", self.hidden // parts, self.intermediate),
            Matrix("head", self.vocab // parts, self.hidden, "float32"),
        ]


LLAMA_1B = Shape("1b", 2048, 8192, 16, 32, 8, 64, 128256, 9216, is_tied=True)
"""The shape of docs/performance.md, with room for prompts of 8,192 tokens."""
LLAMA_8B = Shape("8b", 4096, 14336, 32, 32, 8, 128, 128256, 9216)
LLAMA_70B = Shape("70b", 8192, 28672, 80, 64, 8, 128, 128256, 9216)
TINY = Shape("tiny", 64, 128, 1, 4, 2, 16, 256, 128, is_tied=True)
"""The shape with which every stage runs on a CPU in seconds."""


def fill_by_counter(numbers: torch.Tensor, name: str, deviation: float = _DEVIATION) -> None:
    """Fill a contiguous float tensor with evenly distributed numbers of this standard deviation and mean 0."""
    flat, seed = numbers.view(-1), zlib.crc32(name.encode())
    bound = deviation * 3.0**0.5
    for first in range(0, flat.numel(), _CHUNK):
        chunk = flat[first : first + _CHUNK]
        counters = torch.arange(first, first + chunk.numel(), dtype=torch.int64, device=numbers.device)
        counters.add_(_signed(seed << 32)).mul_(_signed(_GOLDEN))
        for shift, factor in ((30, _FIRST), (27, _SECOND)):
            counters.bitwise_xor_(_shifted(counters, shift)).mul_(_signed(factor))
        counters.bitwise_xor_(_shifted(counters, 31))
        # The upper 24 bits as a float32, exactly: -1 to 1.
        chunk.copy_(counters.bitwise_right_shift_(40).to(torch.float32).mul_(2.0**-23).mul_(bound))


def made_module(shape: Shape, device: torch.device, dtype: torch.dtype, attention: str) -> Any:
    """A transformers module of a shape on a device, with weights by counter and norms of ones.

    `attention` is the name of its attention in transformers' AttentionInterface. Memory is allocated once.
    """
    from transformers import AutoModelForCausalLM

    settings = made_config(shape)
    # Made where it belongs: its own initialisation takes milliseconds there, and sets up what isn't a weight.
    with torch.device(device), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        module: Any = AutoModelForCausalLM.from_config(settings, dtype=dtype, attn_implementation=attention)
    module.eval().requires_grad_(False)
    fill_weights(module)
    return module


def made_config(shape: Shape) -> Any:
    """A shape as a transformers configuration without special tokens."""
    from transformers import AutoConfig

    fields = shape.config
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return AutoConfig.for_model(fields.pop("model_type"), **none, **fields)


def fill_weights(module: nn.Module) -> None:
    """Fill every weight of a module by its name; vectors are norms' and become ones."""
    for name, weight in module.named_parameters():
        if weight.dim() > 1:
            fill_by_counter(weight.data, name)
        else:
            weight.data.fill_(1.0)


def _signed(number: int) -> int:
    """A number of 64 bits as torch's int64 has it."""
    return number - (1 << 64) if number >> 63 else number


def _shifted(numbers: torch.Tensor, by: int) -> torch.Tensor:
    """Numbers of 64 bits shifted to the right, with zeros from the left."""
    return (numbers >> by).bitwise_and_((1 << (64 - by)) - 1)
