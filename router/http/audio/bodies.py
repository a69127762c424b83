"""The form of a transcription or a translation, whose fields are texts."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from router.http.bodies.fields import NotServed
from router.http.bodies.strict import Strict

ResponseFormat = Literal["json", "text", "verbose_json", "srt", "vtt"]
Granularity = Literal["segment", "word"]


def _file(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("must be the part of a form with the audio file")
    return value


def _temperature(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0.0 <= number <= 1.0:
        raise ValueError("must be a number from 0 to 1")
    return number


def _switch(value: Any) -> bool:
    if value not in ("true", "false"):
        raise ValueError("must be true or false")
    return bool(value == "true")


def _granularities(value: Any) -> frozenset[Granularity]:
    if any(one not in ("segment", "word") for one in value):
        raise ValueError("must be segment or word")
    return frozenset(value)


class SpeechBody(Strict):
    """The fields of OpenAI's API for speech to text."""

    file: Annotated[bytes, PlainValidator(_file), WithJsonSchema({"type": "string", "format": "binary"})]
    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: ResponseFormat = "json"
    temperature: Annotated[float, PlainValidator(_temperature, json_schema_input_type=float)] = 0.0
    stream: Annotated[bool, PlainValidator(_switch, json_schema_input_type=bool)] = False
    timestamp_granularities: Annotated[
        frozenset[Granularity], PlainValidator(_granularities, json_schema_input_type=list[str])
    ] = Field(frozenset(), alias="timestamp_granularities[]")
    chunking_strategy: Literal["auto"] | None = None
    """All audio is divided."""
    include: NotServed = Field(None, alias="include[]")
