"""The items of a response as a function of its text: whatever it is, and however it is cut into pieces."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest

from baton.messages.generation import Chunk
from baton.text.tool_calls.formats import FORMATS
from router.http.answer_items import Begun
from router.http.parsed_text import TextParsing
from router.http.responses.output import Change, OutputEnded, OutputGrown, OutputItem, ResponseDraft, ResponseInProgress
from tests.support.tool_formats import written

CALL = written("hermes", [("f", {"q": 1})])
HEAD, ARGUMENTS, TAIL = CALL.partition('"q": 1')
PIECES = ["<think>", "</think>", "q", " ", "\n", CALL, HEAD, ARGUMENTS, TAIL, "<tool_call>", "{", "}", '"']
HERMES = TextParsing(FORMATS["hermes"], ["f"], 3, reasons=True)


def response(parsing: TextParsing = HERMES) -> ResponseInProgress:
    return ResponseInProgress(ResponseDraft("resp_r", 1, "demo", {}, False), parsing.sequence("r", 0), "r", 1)


def changes_of(response: ResponseInProgress, pieces: Iterable[str]) -> list[Change]:
    changes = [change for piece in pieces for change in response.take(Chunk(0, (), piece))]
    return changes + response.finish("stop")


def told(items: Iterable[OutputItem]) -> list[tuple[str, str, str, str, str]]:
    return [(item.kind, item.id, item.call_id, item.text, item.status) for item in items]


@pytest.mark.parametrize("seed", range(200))
def test_items_are_a_function_of_the_text(seed: int) -> None:
    rng = Random(seed)
    text = "".join(rng.choices(PIECES, k=rng.randrange(1, 14)))
    whole, cut = response(), response()
    changes_of(whole, [text])
    changes = changes_of(cut, text)
    assert told(whole.items) == told(cut.items)
    # Items come one after the other, each with a text that its changes say piece by piece.
    ended: list[OutputItem] = []
    for change in changes:
        assert change.item.place == len(ended)
        match change:
            case Begun(item):
                texts: list[str] = []
            case OutputGrown(_, piece, _):
                texts.append(piece)
            case OutputEnded(item):
                assert item.text == "".join(texts)
                ended.append(item)
    assert ended == cut.items
    assert len({item.id for item in ended}) == len(ended)
    assert sum(item.text.count("q") for item in ended) == text.count("q"), "no text is lost"


def test_an_item_that_was_not_ended_by_the_text_ends_with_it() -> None:
    for text, reason, status in [
        ("q", "length", "incomplete"),
        ("q", "stop", "completed"),
        ("", "length", "incomplete"),
    ]:
        output = response()
        output.take(Chunk(0, (), text))
        output.finish(reason)
        assert told(output.items) == [("message", "msg_r_1", "", text, status)]
        assert [item.as_item().as_object()["status"] for item in output.items] == [status]  # what is listed later


def test_log_probabilities_without_text_come_with_the_next_text_or_the_end() -> None:
    output = response(TextParsing())
    told = []
    for text, logprobs in [("", "1"), ("q", "2"), ("", "3")]:
        output.take_logprobs(logprobs)
        told.append(output.take(Chunk(0, (), text)))
    told.append(output.finish("stop"))
    (item,) = output.items
    assert told == [
        [],
        [Begun(item), OutputGrown(item, "q", "1, 2")],
        [],
        [OutputGrown(item, "", "3"), OutputEnded(item)],
    ]
    assert item.all_logprobs == "[1, 2, 3]"
