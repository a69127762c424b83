"""The architectures of GGUF files that are known: their configuration and their tensors in transformers' words.

What llama.cpp's converter (`convert_hf_to_gguf.py`) changed is listed here to be undone: names of tensors, the order of
the rows of llama's queries and keys, and the 1 that is added to gemma's norms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.errors import ConfigError
from baton.model_formats.gguf.facts import Facts
from baton.model_formats.gguf.rotary import rope_parameters
from baton.model_formats.limits import LONGEST_CONTEXT

_Config = dict[str, Any]

_WHOLE_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_NOT_WEIGHTS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Tensors that became part of the configuration."""
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,4})\.([a-z_]+)\.(weight|bias)\Z")
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMED_HEADS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA3_PERIOD = 6
"""Every sixth layer of Gemma 3 attends to all tokens, the others have a window."""
_LARGE_GEMMAS = {("gemma2", 46), ("gemma3", 62)}
"""Architecture and number of layers of the 27B models, whose scale of attention is not that of their heads' size."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture: what transformers calls it, and how its tensors differ."""

    model_type: str
    model_class: str
    parts: Mapping[str, str]
    """The names of a layer's parts in GGUF, and in transformers."""
    more_config: Callable[[Facts], _Config]
    """The fields of config.json that only this architecture has."""
    has_interleaved_heads: bool = False
    """Whether the rows of queries and keys are in another order, in which rotation takes neighbouring pairs."""
    norms_include_one: bool = False
    """Whether norms are stored with the 1 that transformers adds when it computes them."""

    def weight_name(self, name: str, num_layers: int) -> str | None:
        """A tensor's name in transformers; None for one that is no weight. Raises ConfigError for an unknown one."""
        if name in _NOT_WEIGHTS:
            return None
        if name in _WHOLE_MODEL:
            return _WHOLE_MODEL[name]
        match = _LAYER.match(name)
        if match is None or match[2] not in self.parts or int(match[1]) >= num_layers:
            raise ConfigError(f"tensor {name} has no place in a {self.model_type} model of {num_layers} layers")
        return f"model.layers.{int(match[1])}.{self.parts[match[2]]}.{match[3]}"

    def interleaved_heads(self, name: str, config: Mapping[str, Any]) -> int:
        """The number of heads in a tensor whose rows are in the other order; 0 for other tensors."""
        match = _LAYER.match(name)
        if not self.has_interleaved_heads or match is None or match[2] not in ("attn_q", "attn_k"):
            return 0
        return int(config["num_attention_heads" if match[2] == "attn_q" else "num_key_value_heads"])


def architecture_of(facts: Facts) -> Architecture:
    """The architecture of a file; raises ConfigError for one that is not known, and for parts of a model."""
    name = facts.architecture
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"{facts.file.path} holds a model of architecture {name[:40]!r}; GGUF files are read of {known}"
        )
    if facts.has(".expert_count"):
        raise ConfigError(f"{facts.file.path} holds a mixture of experts, which is not read from GGUF files")
    if facts.has("split.count") and facts.whole("split.count") > 1:
        raise ConfigError(f"{facts.file.path} is a part of a model; join the parts with llama-gguf-split --merge")
    return ARCHITECTURES[name]


def configuration(facts: Facts) -> _Config:
    """The content of config.json. Special tokens are not in it; generation_config.json has them."""
    architecture = architecture_of(facts)
    hidden, heads = facts.whole(".embedding_length"), facts.whole(".attention.head_count")
    layers, num_tensors = facts.whole(".block_count"), len(facts.file.tensors)
    if layers > num_tensors:
        raise ConfigError(f"{facts.file.path} has {num_tensors} tensors, of which {layers} layers can't be made")
    return {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "vocab_size": facts.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": facts.whole(".feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": facts.whole(".attention.head_count_kv", heads),
        "head_dim": _head_dim(facts),
        "max_position_embeddings": _context_length(facts),
        "rms_norm_eps": facts.real(".attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(facts, _rotated(facts)),
        "tie_word_embeddings": "output.weight" not in facts.file.tensors,
        "dtype": "bfloat16",
        **architecture.more_config(facts),
    }


def _context_length(facts: Facts) -> int:
    length = facts.whole(".context_length")
    if length > LONGEST_CONTEXT:
        raise ConfigError(f"{facts.file.path} has a context of {length} tokens, more than {LONGEST_CONTEXT}")
    return length


def _head_dim(facts: Facts) -> int:
    return facts.whole(
        ".attention.key_length", max(1, facts.whole(".embedding_length") // facts.whole(".attention.head_count"))
    )


def _rotated(facts: Facts) -> int:
    """The number of elements of a head that are rotated."""
    head_dim = _head_dim(facts)
    rotated = facts.whole(".rope.dimension_count", head_dim)
    if rotated > head_dim or (rotated < head_dim and facts.architecture != "phi3"):
        raise ConfigError(
            f"{facts.file.path} rotates {rotated} of the {head_dim} elements of each head; a part is read of phi3 alone"
        )
    return rotated


def _llama(facts: Facts) -> _Config:
    tensors = facts.file.tensors
    return {
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


def _qwen2(_facts: Facts) -> _Config:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _qwen3(facts: Facts) -> _Config:
    return {
        "hidden_act": "silu",
        "use_sliding_window": False,
        "attention_bias": "blk.0.attn_q.bias" in facts.file.tensors,
    }


def _gemma(facts: Facts) -> _Config:
    layers = facts.whole(".block_count")
    scalar = _head_dim(facts)
    if (facts.architecture, layers) in _LARGE_GEMMAS:
        scalar = facts.whole(".embedding_length") // facts.whole(".attention.head_count")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "attention_bias": False,
    }


def _gemma2(facts: Facts) -> _Config:
    return {
        **_gemma(facts),
        "sliding_window": facts.whole(".attention.sliding_window", 4096),
        "attn_logit_softcapping": facts.real(".attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.real(".final_logit_softcapping", 30.0),
    }


def _gemma3(facts: Facts) -> _Config:
    period = facts.whole(".attention.sliding_window_pattern", _GEMMA3_PERIOD)
    places = range(1, facts.whole(".block_count") + 1)
    return {
        **_gemma(facts),
        "sliding_window": facts.whole(".attention.sliding_window"),
        "layer_types": ["sliding_attention" if layer % period else "full_attention" for layer in places],
        "rope_parameters": {
            "full_attention": rope_parameters(facts, _rotated(facts)),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": facts.positive(".rope.freq_base_swa", 10_000.0),
            },
        },
    }


def _phi3(facts: Facts) -> _Config:
    rotated = _rotated(facts)
    rope = rope_parameters(facts, rotated)
    rope["partial_rotary_factor"] = rotated / _head_dim(facts)
    context = _context_length(facts)
    window = facts.whole(".attention.sliding_window", context)
    return {
        "hidden_act": "silu",
        "rope_parameters": rope,
        "original_max_position_embeddings": rope.get("original_max_position_embeddings", context),
        "sliding_window": window if window < context else None,
        "pad_token_id": None,
    }


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", _PARTS, _llama, has_interleaved_heads=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _PARTS, _qwen2),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _PARTS | _NORMED_HEADS, _qwen3),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _PARTS | _GEMMA_NORMS, _gemma2, norms_include_one=True),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _PARTS | _NORMED_HEADS | _GEMMA_NORMS,
        _gemma3,
        norms_include_one=True,
    ),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {
            **{part: name for part, name in _PARTS.items() if part not in ("attn_q", "attn_k", "attn_v", "ffn_gate")},
            "attn_qkv": "self_attn.qkv_proj",
            "ffn_up": "mlp.gate_up_proj",
        },
        _phi3,
    ),
}
"""The known architectures by `general.architecture`. Mistral's and SmolLM's models are of architecture llama."""
