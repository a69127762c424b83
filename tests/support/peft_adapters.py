"""Adapters that PEFT itself writes for tiny models, and what it generates with them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

SETTINGS: Sequence[Mapping[str, Any]] = (
    {"r": 4, "lora_alpha": 8},
    {"r": 3, "lora_alpha": 6, "use_rslora": True, "lora_bias": True},
)


def write_peft_adapter(
    base: Path, directory: Path, seed: int, kind: str = "AutoModelForCausalLM", **settings: Any
) -> None:
    """Write an adapter of random numbers for a base model, with these settings of PEFT.

    `kind`: the class of transformers that loads the base model.
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    model = get_peft_model(
        load_base(base, kind), LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(str(directory))


def generate_with_peft(
    base: Path, adapter: Path | None, prompts: Mapping[str, Sequence[int]], new_tokens: int = 12
) -> dict[str, list[int]]:
    """Greedy tokens of each prompt alone, with an adapter or without one."""
    model = load_with_adapter(base, adapter)
    found = {}
    for name, prompt in prompts.items():
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found[name] = out[0, len(prompt) :].tolist()
    return found


def load_with_adapter(base: Path, adapter: Path | None, kind: str = "AutoModelForCausalLM") -> Any:
    """The base model of transformers, with an adapter or without one."""
    from peft import PeftModel

    model = load_base(base, kind)
    return model if adapter is None else PeftModel.from_pretrained(model, adapter).eval()


def load_base(base: Path, kind: str = "AutoModelForCausalLM") -> Any:
    """The base model of transformers, in float32, loaded by the class `kind`."""
    import transformers

    return (
        getattr(transformers, kind)
        .from_pretrained(base, dtype=torch.float32, local_files_only=True, attn_implementation="eager")
        .eval()
    )
