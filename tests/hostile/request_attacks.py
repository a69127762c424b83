"""Attacks by HTTP requests that are meant to cost more than they may, with a client's key if keys are required."""

from __future__ import annotations

import base64
import json
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from tests.hostile.http1_attacks import exchange
from tests.hostile.peers import Answers, Target, run_in_threads

_HEAD = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_CHAT, _COMPLETIONS, _EMBEDDINGS = b"/v1/chat/completions", b"/v1/completions", b"/v1/embeddings"
Attack = Callable[[Target, threading.Event], Answers]


def _again(path: bytes, body: Callable[[], bytes], at_once: int) -> Attack:
    """The same request again and again, so many at a time, and once at least: to make it may take longer than the
    attack was to last."""

    def attack(target: Target, over: threading.Event) -> Answers:
        answers: Answers = Counter()
        said = body()

        def one() -> None:
            while True:
                try:
                    answers[exchange(target, _HEAD % path, said, over)] += 1
                except OSError:
                    answers["closed"] += 1
                    over.wait(0.02)
                if over.is_set():
                    return

        run_in_threads([one] * at_once)
        return answers

    return attack


def _chat(messages: list[dict[str, str]]) -> Callable[[], bytes]:
    return lambda: json.dumps({"model": "", "messages": messages, "max_tokens": 2}, separators=(",", ":")).encode()


def _schema(schema: Mapping[str, Any]) -> Attack:
    shape = {"type": "json_schema", "json_schema": {"name": "bomb", "schema": schema, "strict": True}}
    body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 4, "response_format": shape}
    return _again(_CHAT, lambda: json.dumps(body).encode(), 2)


def _prompt(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"prompt": "go", "max_tokens": 2, **fields}, separators=(",", ":")).encode()


def _rows(num_rows: int, width: int) -> Callable[[], bytes]:
    """Rows of zeros, and of one NaN at the end."""
    size = 4 * num_rows * width
    header = json.dumps({"x": {"dtype": "F32", "shape": [num_rows, width], "data_offsets": [0, size]}}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(size - 4) + struct.pack("<f", float("nan"))
    return _prompt(prompt_embeds=base64.b64encode(content).decode())


def _patterns(patterns: list[str]) -> list[dict[str, str]]:
    return [{"type": "string", "pattern": pattern} for pattern in patterns]


_MEGABYTE = 1_000_000
"""Nearly as much as a body may have."""


_RECURSION = {
    "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}, {"type": "array", "items": {"$ref": "#/$defs/a"}}],
}
_NESTED_ARRAYS = {
    "type": "array",
    "items": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{500}$"}, "minItems": 2000},
    "minItems": 2000,
    "maxItems": 4000,
}
_OPTIONAL = {f"p{number}": {"type": "string", "pattern": "^[a-z]{1,50}.*[0-9]{3,40}$"} for number in range(800)}

SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "allOf of patterns": {"allOf": _patterns([f"^.*a.{{{number}}}$" for number in range(1, 28)])},
    "anyOf of patterns": {"anyOf": _patterns([f"^.*{number}.{{10}}$" for number in range(400)])},
    "nested quantifiers": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"},
    "an automaton of 2^30 states": {"type": "string", "pattern": "^.*a.{30}$"},
    "classes of Unicode": {"type": "string", "pattern": "^(\\p{L}{1,1000}){1,50}$"},
    "$ref recursion": {"$defs": {"a": _RECURSION}, "$ref": "#/$defs/a"},
    "ranges of numbers": {"type": "number", "minimum": 1e-300, "maximum": 1e300, "multipleOf": 0.0000001},
    "ranges of integers": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    "arrays of arrays": _NESTED_ARRAYS,
    "long strings": {"type": "string", "minLength": 100_000, "maxLength": 10_000_000},
    "800 patterns": {"type": "object", "properties": _OPTIONAL},
    "10,000 properties": {"type": "object", "properties": {f"p{number}": {} for number in range(4_000)}},
    "an enum of 5,000": {"enum": [f"v{number}" for number in range(5_000)]},
}
"""The one with 10,000 has as many as fit into 64 KiB, which is the most that is taken."""

ATTACKS: Mapping[str, Attack] = {
    **{f"schema: {name}": _schema(schema) for name, schema in SCHEMAS.items()},
    "80 chats of 1 MB": _again(_CHAT, _chat([{"role": "user", "content": "word " * (_MEGABYTE // 5)}]), 80),
    "80 prompts of 1 MB": _again(_COMPLETIONS, _prompt(prompt="word " * (_MEGABYTE // 5)), 80),
    "prompt of one letter, 1 MB": _again(_COMPLETIONS, _prompt(prompt="a" * _MEGABYTE), 4),
    "prompt of 500,000 token ids": _again(_COMPLETIONS, _prompt(prompt=[7] * 500_000), 4),
    "50,000 prompts": _again(_COMPLETIONS, _prompt(prompt=["a"] * 50_000), 4),
    "100,000 stop strings": _again(_COMPLETIONS, _prompt(stop=["x"] * 100_000), 4),
    "logit bias of 60,000 entries": _again(_COMPLETIONS, _prompt(logit_bias={str(n): 1 for n in range(60_000)}), 4),
    "number of 900,000 digits": _again(_COMPLETIONS, lambda: b'{"prompt":"a","max_tokens":' + b"9" * 900_000 + b"}", 4),
    "name of a field, 1 MB": _again(_COMPLETIONS, _prompt(**{"k" * _MEGABYTE: 1}), 4),
    "chat of 65,523 empty messages": _again(_CHAT, _chat([{"role": "user"}] * 65_523), 4),
    "50,000 embeddings": _again(_EMBEDDINGS, lambda: json.dumps({"input": ["a"] * 50_000}).encode(), 4),
    "100,000 unknown fields": _again(_COMPLETIONS, _prompt(**{f"k{n}": 1 for n in range(80_000)}), 4),
    "JSON of 100,000 levels": _again(_COMPLETIONS, lambda: b'{"prompt":' + b"[" * 400_000 + b"]" * 400_000 + b"}", 4),
    "8 MB of rows with one NaN": _again(_COMPLETIONS, _rows(8_190, 256), 16),
    "8 MB of rows as one row": _again(_COMPLETIONS, _rows(1, 8_190 * 256), 16),
    "control characters": _again(_COMPLETIONS, _prompt(prompt="\x00\x01\x1b[2J" * 1000, user="\r\n\x00"), 4),
}
