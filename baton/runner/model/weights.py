"""Loads a checked model directory as a transformers module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from baton.errors import ConfigError
from baton.runner.backends.device import CPU
from baton.runner.model.attention import ATTENTION_NAME
from baton.runner.model.checkpoint import Checkpoint, open_checkpoint
from baton.runner.model.layers import EXPERTS_NAME
from baton.runner.model.mapped_files import tensors_on_file

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model as transformers built it, in evaluation mode, before its products are replaced."""

    module: nn.Module
    config: Any
    """The text model's transformers configuration."""
    checkpoint: Checkpoint
    dtype: str
    """float32 or bfloat16."""
    architecture: str
    device: torch.device = CPU


def resolve_dtype(name: str, device: torch.device = CPU) -> str:
    """The dtype by name; `auto` is bfloat16 where the device multiplies it natively, otherwise float32.

    Raises ConfigError for unknown names.
    """
    if name == "auto" and device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    if name == "auto":
        return "bfloat16" if _cpu_flags() & _BFLOAT16_FLAGS else "float32"
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown; use auto, float32 or bfloat16")
    return name


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return frozenset(flags.partition(":")[2].split())


def load_model(directory: Path, dtype: str, device: torch.device = CPU) -> LoadedModel:
    """Load a model directory; `dtype` is auto, float32 or bfloat16.

    Raises ConfigError (one line: what, and how to fix it) for a directory that is missing, incomplete, corrupt, pickled
    or of an architecture that can't run here. Never reaches for the network and runs no code from the directory.
    """
    dtype = resolve_dtype(dtype, device)
    checkpoint = open_checkpoint(directory)
    # Imported only now, since transformers is slow to import and a bad directory is refused without it.
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = _config(checkpoint)
    model_class = _model_class(checkpoint, config)
    try:
        with tensors_on_file(checkpoint.weight_files) as tensors:
            module, info = model_class.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=DTYPES[dtype],
                attn_implementation=ATTENTION_NAME,
                experts_implementation=EXPERTS_NAME,
                local_files_only=True,
                output_loading_info=True,
            )
    except SafetensorError as error:
        raise ConfigError(
            f"the weights in {directory} can't be read ({_first_line(error)}); copy them again"
        ) from error
    except (ValueError, RuntimeError, OSError, KeyError, TypeError) as error:
        raise ConfigError(f"the weights in {directory} don't fit its config.json ({_first_line(error)})") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(
            f"the weights in {directory} lack {len(missing)} tensors that its config.json asks for, first {missing[0]}"
        )
    module.to(device).eval().requires_grad_(False)
    return LoadedModel(module, config.get_text_config(), checkpoint, dtype, model_class.__name__, device)


def _config(checkpoint: Checkpoint) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(checkpoint.directory, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        name = checkpoint.config.get("model_type", "without a model_type")
        raise ConfigError(
            f"{checkpoint.directory} is of type {name!r}, which this version of transformers can't load "
            f"({_first_line(error)}); choose another model or upgrade transformers"
        ) from error


def _model_class(checkpoint: Checkpoint, config: Any) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    refusal = f"{checkpoint.directory} is of type {config.model_type!r}, which is not supported: "
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(refusal + "only decoder-only text models are")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if config.get_text_config() is not config:
        raise ConfigError(refusal + "only text models are, and it has other parts")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ConfigError(refusal + "its attention can't be exchanged for the paged one")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ConfigError(refusal + f"it has layers of type {', '.join(sorted(kinds))}")
    return model_class


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
