"""Recorded traces of requests, replayed at another speed or with other lengths."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TextIO

from baton.bench.workloads.workload import Piece, WorkloadRequest, unique_piece
from baton.errors import InvalidRequest


class BrokenTraceLine(InvalidRequest):
    """A line of a trace can't be used; the message names file, line and fault."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{path}:{line}", reason)
        self.line = line


class TraceLine(NamedTuple):
    """One request of a trace."""

    timestamp_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    """Names of the prompt's blocks; the last block may be partial. Empty: the prompt shares nothing."""


Parse = Callable[[str], TraceLine]
"""Parses one line; raises ValueError with the reason."""


class TraceFormat(NamedTuple):
    """The file format of a trace."""

    parse: Parse
    header: str | None
    """The first line; None: there is no header."""
    block_tokens: int
    """Tokens that each hash id stands for."""


@dataclass(frozen=True, slots=True)
class TraceScale:
    """How a trace is changed before it is replayed."""

    time: float = 1.0
    """Times are divided by it: 2 is twice as fast."""
    length: float = 1.0
    """Lengths of prompts and of blocks are multiplied by it, so that shared prefixes stay shared."""
    output: float = 1.0
    """Lengths of outputs are multiplied by it."""
    max_input: int | None = None
    """Longer prompts are truncated."""
    max_output: int | None = None


@dataclass(slots=True)
class Trace:
    """A trace file as a workload; see `baton.bench.workloads.trace` and `azure`."""

    path: Path
    format: TraceFormat
    scale: TraceScale = TraceScale()
    limit: int | None = None
    """Only this many requests from the trace's start."""
    seed: int = 0
    """Seed for the tokens of prompts whose blocks have no names."""
    skip_broken: bool = False
    """Skip broken lines instead of raising."""
    num_skipped: int = 0
    """Broken lines that the latest iteration skipped."""
    _count: int | None = None

    def __len__(self) -> int:
        """Reads the whole trace on the first call; raises BrokenTraceLine."""
        if self._count is None:
            self._count = sum(1 for _ in self)
        return self._count

    def __iter__(self) -> Iterator[WorkloadRequest]:
        """Reads the file; raises BrokenTraceLine and OSError."""
        self.num_skipped = 0
        with self.path.open(encoding="utf-8", errors="replace") as file:
            first_s: float | None = None
            for index, line in enumerate(self._lines(file)):
                if index == self.limit:
                    break
                first_s = line.timestamp_s if first_s is None else first_s
                yield self._request(index, line, first_s)

    def _lines(self, file: TextIO) -> Iterator[TraceLine]:
        latest = float("-inf")
        for number, text in enumerate(file, 1):
            words = text.strip()
            if not words:
                continue
            try:
                if number == 1 and self.format.header is not None:
                    if words.lstrip("\ufeff") != self.format.header:
                        raise ValueError(f"the header is not {self.format.header!r}")
                    continue
                line = self.format.parse(words)
                if line.timestamp_s < latest:
                    raise ValueError("its timestamp is earlier than that of the line before")
            except ValueError as error:
                if not self.skip_broken:
                    raise BrokenTraceLine(self.path, number, str(error)) from None
                self.num_skipped += 1
                continue
            latest = line.timestamp_s
            yield line

    def _request(self, index: int, line: TraceLine, first_s: float) -> WorkloadRequest:
        scale = self.scale
        input_length = _scaled(line.input_length, scale.length, scale.max_input)
        output_length = _scaled(line.output_length, scale.output, scale.max_output)
        pieces = self._pieces(index, line, input_length)
        arrival_s = (line.timestamp_s - first_s) / scale.time
        return WorkloadRequest(index, arrival_s, input_length, output_length, pieces)

    def _pieces(self, index: int, line: TraceLine, length: int) -> tuple[Piece, ...]:
        block = max(1, round(self.format.block_tokens * self.scale.length))
        pieces, rest = [], length
        for hash_id in line.hash_ids:
            if rest <= 0:
                break
            pieces.append(Piece(hash_id, min(block, rest)))
            rest -= block
        if rest > 0:
            pieces.append(unique_piece(rest, self.seed, index))
        return tuple(pieces)


def whole_number(value: object, name: str, least: int) -> int:
    """Checks that a field's value is an integer from `least` to below 2^48; raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is not a whole number")
    if not least <= value < 1 << 48:
        raise ValueError(f"{name} is {value}, which is not between {least} and 2^48")
    return value


def _scaled(length: int, scale: float, limit: int | None) -> int:
    scaled = max(1, round(length * scale))
    return scaled if limit is None else min(scaled, limit)


# Mooncake's traces (Qin et al., FAST 2025): JSON lines {timestamp, input_length, output_length, hash_ids}.
#
# Timestamps are milliseconds. A hash id names a block of 512 tokens (the last block may be shorter) together with all
# tokens before it.

_BLOCK_TOKENS = 512


def _parse_mooncake(text: str) -> TraceLine:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    for name in ("timestamp", "input_length", "output_length", "hash_ids"):
        if name not in fields:
            raise ValueError(f"{name} is missing")
    timestamp = fields["timestamp"]
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp < 1e15:
        raise ValueError(f"timestamp is {timestamp!r}, which is not a number of milliseconds")
    hash_ids = fields["hash_ids"]
    if not isinstance(hash_ids, list):
        raise ValueError("hash_ids is not a list")
    return TraceLine(
        timestamp / 1e3,
        whole_number(fields["input_length"], "input_length", 1),
        whole_number(fields["output_length"], "output_length", 0),
        tuple(whole_number(hash_id, "a hash id", 0) for hash_id in hash_ids),
    )


MOONCAKE = TraceFormat(_parse_mooncake, None, _BLOCK_TOKENS)


# Azure's LLM inference traces (Patel et al., ISCA 2024): CSV lines TIMESTAMP,ContextTokens,GeneratedTokens.
#
# The trace does not say which prompts share a prefix, so none do.

_FIELDS = 3
_SECONDS_FROM = len("2023-11-16 18:17:")
"""Index of a timestamp's seconds; they have seven decimals, one more than `datetime` reads."""


def _parse_azure(text: str) -> TraceLine:
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


AZURE = TraceFormat(_parse_azure, "TIMESTAMP,ContextTokens,GeneratedTokens", 1)
