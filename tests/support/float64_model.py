"""A decoder of the shapes of Llama, Qwen 2 and Qwen 3 (with experts) in float64, written plainly from their papers.

It shares no code with Baton or transformers. All products go through one function, so that a test can watch and disturb
their inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.nn import functional

Product: TypeAlias = Callable[[Sequence[str], torch.Tensor], list[torch.Tensor]]
"""From the names of layers and their common input x [T, K] to their outputs [T, N]."""
Cache: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From a layer's number, keys and values [T, KH, D] to the keys and values that queries attend to."""


class Float64Model:
    """One model: its config.json, and its tensors by the names of transformers' checkpoints."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self._config = config
        self._tensors = {name: tensor.double() for name, tensor in tensors.items()}
        self._heads = int(config["num_attention_heads"])
        self._kv_heads = int(config["num_key_value_heads"])
        self._width = int(config.get("head_dim") or config["hidden_size"] // self._heads)
        self._head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"

    @property
    def is_mixture(self) -> bool:
        """Whether it has experts, of which a router chooses some."""
        return "num_experts_per_tok" in self._config

    def weight(self, layer: str) -> torch.Tensor:
        """The weight [N, K] of a layer."""
        return self._tensors[f"{layer}.weight"]

    def bias(self, layer: str) -> torch.Tensor | float:
        """The bias [N] of a layer; 0.0 if it has none."""
        return self._tensors.get(f"{layer}.bias", 0.0)

    def exact_product(self, layers: Sequence[str], x: torch.Tensor) -> list[torch.Tensor]:
        """The products of x with the weights as they are."""
        return [x @ self.weight(layer).T + self.bias(layer) for layer in layers]

    def logits(
        self, token_ids: Sequence[int], product: Product | None = None, cache: Cache | None = None
    ) -> torch.Tensor:
        """The logits of every position: float64 [T, vocabulary].

        Products are called in the order in which a step computes them: of each layer the one of queries, keys and
        values, the output of attention, then the MLP (of a mixture its router, then each expert that has rows, by its
        number), and in the end the head.
        """
        product = product or self.exact_product
        x = self._tensors["model.embed_tokens.weight"][list(token_ids)]
        for number in range(int(self._config["num_hidden_layers"])):
            layer = f"model.layers.{number}"
            x = x + self._attention(number, self._norm(f"{layer}.input_layernorm", x), product, cache)
            inner = self._norm(f"{layer}.post_attention_layernorm", x)
            is_mixture = f"{layer}.mlp.gate.weight" in self._tensors
            x = x + (self._experts if is_mixture else self._mlp)(f"{layer}.mlp", inner, product)
        return product([self._head], self._norm("model.norm", x))[0]

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        square = x.square().mean(dim=-1, keepdim=True)
        return x / torch.sqrt(square + self._config["rms_norm_eps"]) * self._tensors[f"{name}.weight"]

    def _attention(self, number: int, x: torch.Tensor, product: Product, cache: Cache | None) -> torch.Tensor:
        layer = f"model.layers.{number}.self_attn"
        query, key, value = (
            rows.view(len(x), -1, self._width) for rows in product([f"{layer}.{name}_proj" for name in "qkv"], x)
        )
        if f"{layer}.q_norm.weight" in self._tensors:
            query, key = self._norm(f"{layer}.q_norm", query), self._norm(f"{layer}.k_norm", key)
        query, key = self._rotated(query), self._rotated(key)
        if cache is not None:
            key, value = cache(number, key, value)
        shared = self._heads // self._kv_heads
        key, value = (rows.repeat_interleave(shared, dim=1) for rows in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * self._width**-0.5
        future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        shares = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
        attended = torch.einsum("hqk,khd->qhd", shares, value).flatten(1)
        return product([f"{layer}.o_proj"], attended)[0]

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H, D] rotated by its positions. The angles are float32, as the model's definition has them."""
        base = float(self._config["rope_parameters"]["rope_theta"])
        frequencies = 1.0 / base ** (torch.arange(0, self._width, 2, dtype=torch.float32) / self._width)
        angles = (torch.arange(len(x), dtype=torch.float32)[:, None] * frequencies)[:, None].double()
        first, second = x.chunk(2, dim=-1)
        return torch.cat(
            (
                first * angles.cos() - second * angles.sin(),
                second * angles.cos() + first * angles.sin(),
            ),
            dim=-1,
        )

    def _mlp(self, layer: str, x: torch.Tensor, product: Product) -> torch.Tensor:
        gate, up = product([f"{layer}.gate_proj", f"{layer}.up_proj"], x)
        return product([f"{layer}.down_proj"], functional.silu(gate) * up)[0]

    def _experts(self, layer: str, x: torch.Tensor, product: Product) -> torch.Tensor:
        shares = product([f"{layer}.gate"], x)[0].softmax(dim=-1)
        top, chosen = shares.topk(int(self._config["num_experts_per_tok"]), dim=-1)
        if self._config["norm_topk_prob"]:
            top = top / top.sum(dim=-1, keepdim=True)
        total = torch.zeros_like(x)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, rank = (chosen == expert).nonzero(as_tuple=True)
            out = self._mlp(f"{layer}.experts.{expert}", x[rows], product)
            total = total.index_add(0, rows, out * top[rows, rank, None])
        return total
