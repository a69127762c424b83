"""The body of /v1/embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from baton.messages.generation import GenerateRequest
from baton.messages.request_limits import MAX_INPUTS
from router.http.bodies.fields import TextsOrIds, Truncation, is_ids
from router.http.bodies.strict import Strict


def _inputs(value: Any) -> Sequence[str | Sequence[int]]:
    if value in ("", []):
        raise ValueError("is empty")
    if isinstance(value, str) or is_ids(value):
        return (value,)
    if isinstance(value, list) and len(value) > MAX_INPUTS and not isinstance(value[0], int):
        raise ValueError(f"has {len(value)} inputs; at most {MAX_INPUTS} are taken")
    is_alike = isinstance(value, list) and (all(isinstance(one, str) for one in value) or all(map(is_ids, value)))
    if not is_alike:
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")
    if not all(value):
        raise ValueError(f"has an input that is empty: number {next(n for n, one in enumerate(value) if not one)}")
    return tuple(value)


Inputs = Annotated[Sequence[str | Sequence[int]], PlainValidator(_inputs, json_schema_input_type=TextsOrIds)]


class EmbeddingBody(Strict):
    """POST /v1/embeddings"""

    inputs: Inputs = Field(alias="input")
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    truncate_prompt_tokens: Truncation = None
    dimensions: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None

    # Only these values are served.
    add_special_tokens: Literal[True] | None = None
    normalize: Literal[True] | None = None

    # Ignored: they change no answer.
    user: str | None = None

    def request(self, prompt: str | Sequence[int], request_id: str, traceparent: str = "") -> GenerateRequest:
        """The request to the core, for one input."""
        return GenerateRequest(
            prompt=prompt,
            request_id=request_id,
            model=self.model or "",
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            traceparent=traceparent,
            embeds=True,
        )
