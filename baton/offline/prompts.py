"""What a prompt of offline use may be: a text, token ids, or rows of numbers before one of them or alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from baton.errors import InvalidRequest
from baton.messages.generation import PromptEmbeds

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, or its token ids; or `{"prompt_embeds": rows, "prompt": text or token ids}`, where `prompt` may be missing.
The rows are the bytes of a safetensors file, or what numpy makes an array of: [rows, numbers in a row]."""


def is_prompt(value: object) -> bool:
    """Whether this is one prompt."""
    return isinstance(value, str | Mapping) or _is_ids(value)


def taken_apart(prompt: object) -> tuple[str | Sequence[int] | None, Sequence[PromptEmbeds]]:
    """A prompt without its rows, and its rows; raises InvalidRequest for anything else."""
    if not isinstance(prompt, Mapping):
        if not (isinstance(prompt, str) or _is_ids(prompt)):
            raise InvalidRequest("prompt", "must be a text, a list of token ids, or a dictionary with prompt_embeds")
        return prompt, ()  # type: ignore[return-value]  # it has been checked
    unknown = [name for name in prompt if name not in ("prompt", "prompt_embeds")]
    if unknown or "prompt_embeds" not in prompt:
        raise InvalidRequest("prompt", "a dictionary has prompt_embeds, and nothing else but prompt")
    text, rows = prompt.get("prompt"), prompt["prompt_embeds"]
    if text is not None and not isinstance(text, str) and not _is_ids(text):
        raise InvalidRequest("prompt", "must be a text or a list of token ids")
    return text or None, (PromptEmbeds(bytes(rows) if isinstance(rows, bytes | bytearray) else _as_file(rows)),)


def _is_ids(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], int)


def _as_file(rows: object) -> bytes:
    """The rows in the bytes of a safetensors file, in float32, which has all numbers of the other dtypes."""
    try:
        array = np.ascontiguousarray(rows, np.dtype("<f4"))
    except (TypeError, ValueError, RuntimeError) as error:
        reason = f"are no array of numbers ({str(error).splitlines()[0]:.100}); torch's bfloat16 needs .float()"
        raise InvalidRequest("prompt_embeds", reason) from error
    entry = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [0, array.nbytes]}
    header = json.dumps({"prompt_embeds": entry}).encode()
    return struct.pack("<Q", len(header)) + header + array.tobytes()
