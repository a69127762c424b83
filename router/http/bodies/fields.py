"""Types of fields that several bodies have: each checks its value, and refuses it with what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from baton.messages.request_limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKEN_IDS,
)
from router.http.bodies.strict import Treatment


def is_ids(value: Any) -> bool:
    """Whether this is a list of token ids; raises ValueError for more than any request may have."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        return False
    if len(value) > MAX_TOKEN_IDS:
        raise ValueError(f"has {len(value)} token ids; at most {MAX_TOKEN_IDS} are taken")
    return True


def _token_ids(value: Any) -> Sequence[int]:
    if not is_ids(value):
        raise ValueError("must be a list of token ids")
    return list(value)


def _stop_token_ids(value: Any) -> Sequence[int]:
    if value is None:
        return ()
    if isinstance(value, list) and len(value) > MAX_STOP_TOKEN_IDS:
        raise ValueError(f"has {len(value)} entries; at most {MAX_STOP_TOKEN_IDS} are taken")
    return _token_ids(value)


def _allowed_token_ids(value: Any) -> Sequence[int]:
    if value is None:
        return ()
    if value == []:
        raise ValueError("is empty: no token would be allowed")
    if isinstance(value, list) and len(value) > MAX_ALLOWED_TOKEN_IDS:
        raise ValueError(f"has {len(value)} entries; at most {MAX_ALLOWED_TOKEN_IDS} are taken")
    return _token_ids(value)


def _bad_words(value: Any) -> Sequence[str]:
    if value is None:
        return ()
    if isinstance(value, list) and len(value) > MAX_BAD_WORDS:
        raise ValueError(f"has {len(value)} texts; at most {MAX_BAD_WORDS} are taken")
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError("must be a list of strings")
    return tuple(value)


def _stop(value: Any) -> Sequence[str]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and len(value) > MAX_STOP_STRINGS:
        raise ValueError(f"has {len(value)} strings; at most {MAX_STOP_STRINGS} are taken")
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError("must be a string or a list of strings")
    return tuple(value)


def _logit_bias(value: Any) -> Mapping[int, float]:
    if value is None:
        return {}
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(value)} entries; at most {MAX_LOGIT_BIAS} are taken")
    if not isinstance(value, dict) or not all(type(bias) in (int, float) for bias in value.values()):
        raise ValueError("must be an object from token ids to numbers")
    bad = next((key for key in value if not (key.isascii() and key.isdigit() and len(key) < 16)), None)
    if bad is not None:
        raise ValueError(f"has the key {bad[:32]!r}, which is no token id")
    try:
        return {int(key): float(bias) for key, bias in value.items()}
    except OverflowError:
        raise ValueError("has a bias that is too large") from None


def _truncation(value: Any) -> int | None:
    if value is None or (type(value) is int and (value == -1 or 1 <= value <= MAX_TOKEN_IDS)):
        return value
    raise ValueError(f"must be 1 to {MAX_TOKEN_IDS}, or -1 for as many tokens as the model takes")


def _not_served(value: Any) -> None:
    if value not in (None, "", [], {}):
        raise ValueError("is not served here")


Texts = str | list[str]
TextsOrIds = str | list[int] | list[str] | list[list[int]]
"""What a field may be, in the description of the API, that takes a text, token ids, or a list of either."""
TokenIds = Annotated[Sequence[int], PlainValidator(_token_ids, json_schema_input_type=list[int])]
Stop = Annotated[Sequence[str], PlainValidator(_stop, json_schema_input_type=str | list[str])]
StopTokenIds = Annotated[Sequence[int], PlainValidator(_stop_token_ids, json_schema_input_type=list[int])]
AllowedTokenIds = Annotated[Sequence[int], PlainValidator(_allowed_token_ids, json_schema_input_type=list[int])]
BadWords = Annotated[Sequence[str], PlainValidator(_bad_words, json_schema_input_type=list[str])]
LogitBias = Annotated[Mapping[int, float], PlainValidator(_logit_bias, json_schema_input_type=dict[str, float])]
NotServed = Annotated[None, PlainValidator(_not_served, json_schema_input_type=None), Treatment.REFUSED]
_NO_EFFECT = WithJsonSchema({"description": "Accepted; changes no answer."})
Ignored = Annotated[Any, _NO_EFFECT, Treatment.IGNORED]
"""A field that may have any value, and has no effect."""
RepeatedText = Annotated[str | None, _NO_EFFECT, Treatment.IGNORED]
"""A field that has no effect, but that the answer repeats."""
OnlyFalse = Annotated[Literal[False] | None, Treatment.ONE_VALUE]
OnlyTrue = Annotated[Literal[True] | None, Treatment.ONE_VALUE]
Truncation = Annotated[int | None, PlainValidator(_truncation, json_schema_input_type=int)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
