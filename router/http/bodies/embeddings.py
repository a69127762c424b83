"""The body of /v1/embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from baton.messages.pooling import Pooling, PoolingRequest
from baton.messages.request_limits import MAX_INPUTS
from router.http.bodies.fields import TextsOrIds, is_ids
from router.http.bodies.pooling import PoolingBody
from router.pooling import PoolingInput


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


def inputs_of(inputs: Sequence[str | Sequence[int]]) -> Sequence[PoolingInput]:
    """The inputs of a call, each with the name of its field."""
    alone = len(inputs) == 1
    return [PoolingInput(one, field="input" if alone else f"input[{place}]") for place, one in enumerate(inputs)]


class EmbeddingBody(PoolingBody):
    """POST /v1/embeddings"""

    inputs: Inputs = Field(alias="input")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling_type: Literal["last", "cls", "mean"] | None = Field(None, alias="pooling")
    normalize: bool | None = None

    def pooling_inputs(self) -> Sequence[PoolingInput]:
        return inputs_of(self.inputs)

    def pooling(self) -> PoolingRequest:
        kind = None if self.pooling_type is None else Pooling(self.pooling_type)
        return PoolingRequest(kind, self.normalize, self.dimensions)
