"""The bundled model's tokenizer with added tokens, such as Qwen's `<tool_call>`, which is text, and `<|im_end|>`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import baton
from baton.text.tokenizer import TOKENIZER_FILE

PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>", "\n\n\n")
SPECIAL = ("<|im_start|>", "<|im_end|>")


def tokenizer_json(special: Iterable[str] = SPECIAL, **parts: Mapping[str, Any] | None) -> str:
    """The content of tokenizer.json, in which the tokens of PLAIN and SPECIAL come last, those of `special` as special.

    `parts`: what takes the place of its parts, by their names.
    """
    spec = json.loads((Path(baton.__file__).parent / "demo_model" / TOKENIZER_FILE).read_text())
    model = spec["added_tokens"][0]
    first = max(spec["model"]["vocab"].values()) + 1
    spec["added_tokens"] += [
        model | {"id": token, "content": text, "special": text in special, "normalized": False}
        for token, text in enumerate((*PLAIN, *SPECIAL), first)
    ]
    return json.dumps(spec | parts)
