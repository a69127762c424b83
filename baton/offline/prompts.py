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
"""A text, or its token ids; or a dictionary, as vLLM takes it, with `prompt` (a text or token ids), `prompt_token_ids`
(a text beside them is what they were made of), or `prompt_embeds` with or without one of the others behind the rows.
The rows are the bytes of a safetensors file, or what numpy makes an array of: [rows, numbers in a row]."""
_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds")
_ONE_OF_KEYS = "prompt, prompt_token_ids or prompt_embeds"


def is_prompt(value: object) -> bool:
    """Whether this is one prompt."""
    return isinstance(value, str | Mapping) or _is_ids(value)


def taken_apart(prompt: object) -> tuple[str | Sequence[int] | None, Sequence[PromptEmbeds]]:
    """A prompt without its rows, and its rows; raises InvalidRequest for anything else."""
    if not isinstance(prompt, Mapping):
        if not (isinstance(prompt, str) or _is_ids(prompt)):
            raise InvalidRequest("prompt", f"must be a text, a list of token ids, or a dictionary with {_ONE_OF_KEYS}")
        return prompt, ()  # type: ignore[return-value]  # it has been checked
    given = {name: value for name, value in prompt.items() if value is not None}
    if not given or any(name not in _KEYS for name in given):
        raise InvalidRequest("prompt", f"a dictionary has {_ONE_OF_KEYS}, and nothing else")
    ids, text, rows = given.get("prompt_token_ids"), given.get("prompt"), given.get("prompt_embeds")
    if ids is not None and not _is_ids(ids):
        raise InvalidRequest("prompt_token_ids", "must be a list of token ids")
    if text is not None and not isinstance(text, str) and not _is_ids(text):
        raise InvalidRequest("prompt", "must be a text or a list of token ids")
    content: Any = text if ids is None else ids
    if rows is None:
        return content, ()
    return content or None, (PromptEmbeds(bytes(rows) if isinstance(rows, bytes | bytearray) else _as_file(rows)),)


def text_of(prompt: object) -> str | None:
    """The text of a prompt; None if it is given as token ids, or as rows alone."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


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
