"""The body of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from baton.messages.request_limits import MAX_PROMPTS
from router.http.bodies.fields import NotServed, TextsOrIds, is_ids
from router.http.bodies.generation import GenerationBody


def _prompts(value: Any) -> Sequence[str | Sequence[int]]:
    if isinstance(value, str) or (isinstance(value, list) and value and is_ids(value)):
        return (value,)
    if isinstance(value, list) and len(value) > MAX_PROMPTS and not isinstance(value[0], int):
        raise ValueError(f"has {len(value)} prompts; at most {MAX_PROMPTS} are taken")
    if not isinstance(value, list) or not value or not all(isinstance(p, str) or is_ids(p) for p in value):
        raise ValueError("must be a string, a list of token ids, or a list of such")
    return tuple(value)


Prompts = Annotated[Sequence[str | Sequence[int]], PlainValidator(_prompts, json_schema_input_type=TextsOrIds)]


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompts: Prompts = Field(alias="prompt")
    logprobs: int | None = None
    echo: Literal[False] | None = None
    add_special_tokens: Literal[True] | None = None
    suffix: NotServed = None
