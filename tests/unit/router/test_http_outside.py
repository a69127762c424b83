"""Golden conversations of the HTTP APIs: what clients get, byte for byte, while a scripted backend answers.

A file of tests/outside/http is what one router is asked, one request after another:

    > POST /v1/completions
    > {"prompt": "hi", "logprobs": 1}
    * text "Hel"
    * end stop
    < 200
    < content-type: application/json
    <
    {"id": ...

`>` is a request: its path, and its body if it has one. `*` is what the backend says to it: a text (of sequence 0 if no
number is before it), the end of a sequence or of the request, a vector, or an error of baton.errors with its arguments.
`<` is the answer: its status, its headers, and its body, as it is, up to the line break before the next request. The
first two are written by hand, and `scripts/outside` writes the answers.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from baton import errors
from baton.messages.generation import Chunk, GenerateEvent, SequenceFinished
from baton.messages.sampling import TokenLogprobs
from baton.text.chat_template import DEFAULT_TEMPLATE
from tests.doubles.fake_handler import FakeCall
from tests.support.http_rig import HttpRig, finished
from tests.support.outside import FOLDER, assert_as_frozen
from tests.support.tool_formats import THINKING, template

CONVERSATIONS = sorted((FOLDER / "http").glob("*.txt"))
WITH_TOOLS = template("hermes", THINKING)
"""The template in files whose names end in _tools: the model thinks before it answers, and may call tools."""


@dataclass
class Turn:
    """One request, and what the backend says to it."""

    asked: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


def parse(text: str) -> list[Turn]:
    turns: list[Turn] = []
    for line in text.splitlines():
        mark, words = line[:2], line[2:]
        if mark == "> " and words.startswith(("GET ", "POST ", "DELETE ")):
            turns.append(Turn())
        if mark == "> ":
            turns[-1].asked.append(words)
        elif mark == "* ":
            turns[-1].said.append(words)
    return turns


class Saying:
    """What the backend says to one call."""

    def __init__(self, call: FakeCall) -> None:
        self._call = call
        self._counts: dict[int, int] = {}

    def say(self, line: str) -> bool:
        """Say a line; return whether it was the last of the call."""
        word, _, rest = line.partition(" ")
        match word:
            case "text":
                number, quote, text = rest.partition('"')
                self._call.tell(self._chunk(int(number or 0), json.loads(quote + text)))
                return False
            case "sequence":
                number, reason = rest.split()
                self._call.tell(SequenceFinished(int(number), reason, None, self._counts[int(number)]))
                return False
            case "end":
                self._call.tell(finished(rest, sum(self._counts.values())))
            case "vector":
                numbers = [float(number) for number in rest.split()]
                self._call.tell(replace(finished("stop", 0), embedding=struct.pack(f"<{len(numbers)}f", *numbers)))
            case _:
                self._call.tell(getattr(errors, word)(*json.loads(f"[{rest}]")))
        return True

    def _chunk(self, number: int, text: str) -> GenerateEvent:
        first = self._counts.get(number, 0)
        self._counts[number] = first + len(text)
        tokens = tuple(map(ord, text))
        request = self._call.request
        num_logprobs = request.logprobs if request is not None else None
        logprobs = () if num_logprobs is None else tuple(_likely(token, num_logprobs) for token in tokens)
        return Chunk(first, tokens, text, logprobs, number)


def _likely(token: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, 1, [(token + place, -0.5 - place) for place in range(count)])


async def say_all(rig: HttpRig, lines: Sequence[str]) -> None:
    """Say each line to the call that the router is making, and then to the next one. Never returns."""
    saying = None
    for line in lines:
        saying = saying or Saying(await rig.next_call())
        if saying.say(line):
            saying = None
    call = await rig.next_call()
    pytest.fail(f"the backend has nothing to say to {call.request}")


async def held(rig: HttpRig, turn: Turn) -> str:
    """The turn as it goes now, in the format of the files."""
    (method, path), body = turn.asked[0].split(), "".join(turn.asked[1:]).encode()
    exchange = rig.request(method, path, body, {"content-type": "application/json", "x-request-id": "golden"})
    async with asyncio.TaskGroup() as group:
        saying = group.create_task(say_all(rig, turn.said))
        await exchange.end()
        saying.cancel()
    lines = [f"> {line}" for line in turn.asked] + [f"* {line}" for line in turn.said]
    lines += [f"< {exchange.status}", *(f"< {name}: {value}" for name, value in exchange.headers.items()), "<"]
    return "\n".join([*lines, exchange.body.decode(), ""])


async def held_all(rig: HttpRig, turns: Sequence[Turn]) -> str:
    return "".join([await held(rig, turn) for turn in turns])


@pytest.mark.parametrize("path", CONVERSATIONS, ids=lambda path: path.stem)
@pytest.mark.outside
def test_clients_get_the_same_bytes_as_before(path: Path) -> None:
    rig = HttpRig(template=WITH_TOOLS if path.stem.endswith("_tools") else DEFAULT_TEMPLATE)
    turns = parse(path.read_text(encoding="utf-8"))
    assert turns
    assert_as_frozen(f"http/{path.name}", asyncio.run(held_all(rig, turns)))
