"""Azure's LLM inference traces (Patel et al., ISCA 2024): CSV lines TIMESTAMP,ContextTokens,GeneratedTokens.

The trace does not say which prompts share a prefix, so none do.
"""

from __future__ import annotations

from datetime import UTC, datetime

from baton.bench.workloads.trace import TraceFormat, TraceLine, whole_number

_FIELDS = 3
_SECONDS_FROM = len("2023-11-16 18:17:")
"""Index of a timestamp's seconds; they have seven decimals, one more than `datetime` reads."""


def _parse(text: str) -> TraceLine:
    fields = text.split(",")
    if len(fields) != _FIELDS:
        raise ValueError(f"there are {len(fields)} fields instead of {_FIELDS}")
    timestamp, context, generated = fields
    return TraceLine(
        _seconds(timestamp), _tokens(context, "ContextTokens", 1), _tokens(generated, "GeneratedTokens", 0)
    )


def _seconds(text: str) -> float:
    try:
        minute = datetime.fromisoformat(text[:_SECONDS_FROM] + "00").replace(tzinfo=UTC)
        seconds = float(text[_SECONDS_FROM:].removesuffix("+00:00"))
    except ValueError:
        raise ValueError(f"TIMESTAMP is {text[:40]!r}, which is not a date and time") from None
    if not 0 <= seconds < 61:
        raise ValueError(f"TIMESTAMP is {text[:40]!r}, which is not a date and time")
    return minute.timestamp() + seconds


def _tokens(text: str, name: str, least: int) -> int:
    if not text.strip().isdecimal():
        raise ValueError(f"{name} is {text[:40]!r}, which is not a whole number")
    return whole_number(int(text), name, least)


AZURE = TraceFormat("azure", _parse, "TIMESTAMP,ContextTokens,GeneratedTokens", 1)
