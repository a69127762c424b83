"""Adapter directories as PEFT writes them, sound or with one fault."""

from __future__ import annotations

from pathlib import Path

from baton.bench.micro.adapter_files import PREFIX, lora_tensors, safetensors_bytes, write_adapter

__all__ = ["PREFIX", "lora_tensors", "safetensors_bytes", "write_adapter", "write_simple_adapter"]


def write_simple_adapter(directory: Path, seed: int = 0) -> Path:
    """Write an adapter that any seed makes another one, for runners that don't look at its modules."""
    return write_adapter(directory, lora_tensors({"model.layers.0.self_attn.q_proj": (8, 8)}, seed=seed))
