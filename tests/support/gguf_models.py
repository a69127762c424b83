"""Tiny models as GGUF files, written as llama.cpp's converter writes them: its names, row order and norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
import transformers

from baton.runner.model.stored.convert_gguf import convert
from tests.support.gguf_files import random_blocks, write_gguf
from tests.support.tiny_models import TINY_MODELS

VOCAB_SIZE = 320
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "a n", "Ġ a"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ARCHITECTURES: Mapping[str, str] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}
"""The names in GGUF of those tiny models that GGUF files are read of, by their names in `TINY_MODELS`."""


def random_module(name: str, **changes: Any) -> Any:
    """A tiny model of transformers with random weights."""
    torch.manual_seed(0)
    values = {**TINY_MODELS[name], "vocab_size": VOCAB_SIZE, **changes}
    config = transformers.AutoConfig.for_model(**values)
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter_name, parameter in module.named_parameters():
        if parameter_name.endswith("norm.weight"):
            parameter.data += 0.1 * torch.randn_like(parameter)
    return module


def byte_level_tokens() -> Mapping[str, Any]:
    """The metadata of a byte-level tokenizer with a few merges, the tokens of a chat, and unused ones up to the end."""
    alphabet = [chr(value) for value in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))]
    alphabet += [chr(256 + place) for place in range(256 - len(alphabet))]
    tokens = [*alphabet, *(merge.replace(" ", "") for merge in MERGES), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    first_unused = len(tokens)
    tokens += [f"[UNUSED{place}]" for place in range(VOCAB_SIZE - len(tokens))]
    kinds = [1] * (first_unused - 3) + [3] * 3 + [5] * (VOCAB_SIZE - first_unused)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def converted(source: Path, directory: Path) -> Path:
    """Convert a GGUF file to a new model directory."""
    directory.mkdir()
    convert(source, directory, lambda _done, _total: None)
    return directory


def write_module(
    path: Path,
    module: Any,
    matrices: str | Callable[[str], str] = "F32",
    more: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    replaced: Mapping[str, tuple[str, npt.NDArray[Any]]] | None = None,
) -> Path:
    """Write a module, and make its quantised weights mean what their blocks mean.

    `matrices` is the format of its matrices, or gives it for the name of a matrix in the file. `more` are further
    tensors of float32; `metadata` is added to what follows from the module, or replaces it, and so are tensors by
    their format and bytes in `replaced`.
    """
    config = module.config
    architecture = ARCHITECTURES[config.model_type]
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tensors: dict[str, tuple[str, npt.NDArray[Any]]] = {}
    for name, weight in module.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        values = _as_converted(found, weight, config, architecture)
        form = "F32" if values.dim() != 2 else matrices if isinstance(matrices, str) else matrices(found)
        stored = _quantised(values.numpy(), form, seed=len(tensors))
        tensors[found] = (form, stored)
        if form != "F32":
            meant = torch.from_numpy(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[form]))
            weight.copy_(_as_in_transformers(found, meant, config, architecture))
    tensors |= {name: ("F32", np.asarray(values, dtype=np.float32)) for name, values in (more or {}).items()}
    tensors |= replaced or {}
    return write_gguf(
        path, tensors, {**_metadata(config, architecture), **byte_level_tokens(), **(metadata or {})}, architecture
    )


def _quantised(values: npt.NDArray[np.float32], kind: str, seed: int) -> npt.NDArray[Any]:
    """A matrix in a format. Nothing here can quantise to those of type K, so these get random blocks."""
    if kind == "F32":
        return values
    if kind.endswith("_K"):
        return random_blocks(kind, values.shape[0], values.shape[1], seed, scale=3e-4)
    blocks: npt.NDArray[Any] = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    return blocks


def _rows_of_heads(name: str, config: Any, architecture: str) -> int:
    """The heads in whose rows llama.cpp's converter takes neighbouring pairs; 0 for other tensors."""
    if architecture != "llama" or not (".attn_q." in name or ".attn_k." in name):
        return 0
    return int(config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads)


def _as_converted(name: str, weight: torch.Tensor, config: Any, architecture: str) -> torch.Tensor:
    """A weight as `convert_hf_to_gguf.py` writes it."""
    if heads := _rows_of_heads(name, config, architecture):
        return weight.view(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return weight + 1
    return weight


def _as_in_transformers(name: str, matrix: torch.Tensor, config: Any, architecture: str) -> torch.Tensor:
    """A matrix that `convert_hf_to_gguf.py` wrote, as it was before."""
    if heads := _rows_of_heads(name, config, architecture):
        return matrix.view(heads, -1, 2, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)
    return matrix


def _metadata(config: Any, architecture: str) -> Mapping[str, Any]:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if getattr(config, "head_dim", None):
        found |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if architecture.startswith("gemma"):
        found["attention.sliding_window"] = config.sliding_window
    if architecture == "gemma2":
        found |= {
            "attn_logit_softcapping": float(config.attn_logit_softcapping),
            "final_logit_softcapping": float(config.final_logit_softcapping),
        }
    return {f"{architecture}.{key}": value for key, value in found.items()}
