"""`baton chat` over HTTP: what it sends and prints, and how it continues broken streams."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random

import pytest

from baton.cli.chat_stream import ChatClient, Endpoint, EventReader, error_from_object, error_from_response
from baton.cli.main import main
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    InvalidRequest,
    QuotaExceeded,
    RequestNotFound,
    Unauthenticated,
    UnknownModel,
    Unreachable,
    UsageError,
)
from baton.messages.generation import Chunk, Finished
from baton.security.access import Access

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
OPENING = ': waiting\n\nid: 0\ndata: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
DONE = "data: [DONE]\n\n"


def piece(position: int, text: str, ids: Sequence[int] = (7,), reason: str | None = None) -> str:
    choice = {"index": 0, "delta": {"content": text}, "token_ids": list(ids), "finish_reason": reason}
    return f"id: {position}\ndata: {json.dumps({'choices': [choice]})}\n\n"


def whole(*events: str) -> bytes:
    return HEAD + "".join((OPENING, *events)).encode()


def refusal(status: int, **error: str) -> bytes:
    body = json.dumps({"error": error})
    return f"HTTP/1.1 {status} No\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


class Router:
    """A server that sends the next of its answers on each connection, and closes the connection."""

    def __init__(self, answers: Sequence[bytes]) -> None:
        self._answers = list(answers)
        self.heads: list[str] = []
        self.bodies: list[dict[str, object]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        self.heads.append(head)
        self.bodies.append(json.loads(await reader.readexactly(length)))
        writer.write(self._answers.pop(0))
        writer.close()

    def header(self, number: int, name: str) -> str:
        return self.heads[number].partition(f"{name}: ")[2].partition("\r\n")[0]


@asynccontextmanager
async def router(*answers: bytes) -> AsyncIterator[tuple[Router, str]]:
    """Run a scripted router; yields it and its URL."""
    scripted = Router(answers)
    server = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
    yield scripted, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


def ask(url: str, notes: list[str]) -> str:
    client = ChatClient([Endpoint.parse(url)] * 2, Access("secret"), Random(1), bool, notes.append)
    events = list(client.answer({"messages": [], "temperature": 0.5}))
    assert isinstance(events[-1], Finished)
    return "".join(event.text for event in events if isinstance(event, Chunk))


async def test_a_broken_stream_is_continued_after_its_last_event() -> None:
    beginning = whole(piece(1, "a"), piece(3, "bc", (7, 8)))
    rest = whole(piece(4, "d"), piece(5, "!", (), "stop"), DONE)
    notes: list[str] = []
    async with router(beginning, rest) as (scripted, url):
        assert await asyncio.to_thread(ask, url, notes) == "abcd!"
    assert [scripted.header(number, "last-event-id") for number in (0, 1)] == ["", "3"]
    assert scripted.header(0, "x-request-id") == scripted.header(1, "x-request-id") != ""
    assert scripted.header(1, "authorization") == "bearer secret"
    assert scripted.bodies[0] == scripted.bodies[1]
    assert scripted.bodies[0]["seed"], "a request without a seed could not be repeated"
    assert not notes, "a single break is not reported"


async def test_a_request_that_no_router_knows_is_generated_again_and_compared() -> None:
    lost = refusal(404, message="gone", code="not_found")
    again = whole(piece(1, "a"), piece(2, "b", (8,), "stop"), DONE)
    async with router(whole(piece(1, "a")), lost, again) as (scripted, url):
        assert await asyncio.to_thread(ask, url, []) == "ab"
    assert scripted.header(2, "last-event-id") == ""
    other = whole(piece(1, "x", (9,)), DONE)
    async with router(whole(piece(1, "a")), lost, other) as (_, url):
        with pytest.raises(BatonError, match="other tokens came than before"):
            await asyncio.to_thread(ask, url, [])


async def test_an_error_that_ends_a_stream_is_final() -> None:
    error = 'data: {"error":{"message":"too late","type":"timeout_error","code":"deadline_exceeded"}}\n\n'
    async with router(whole(piece(1, "a"), error)) as (_, url):
        with pytest.raises(DeadlineExceeded, match="too late"):
            await asyncio.to_thread(ask, url, [])


async def test_each_line_is_a_message_and_the_conversation_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [whole(piece(1, text, reason="stop"), DONE) for text in ("one", "two", "three")]
    async with router(*answers) as (scripted, url):
        monkeypatch.setattr(sys, "stdin", io.StringIO("first\n\nsecond\n/clear\n/help\nthird\n/bye\nnever\n"))
        words = ["chat", "--url", url + "/v1/", "--system", "be brief", "--max-tokens", "9", "--stop", "x"]
        assert await asyncio.to_thread(main, words) == 0
    assert capsys.readouterr().out == "one\ntwo\nthree\n"
    first, second, third = ([m["content"] for m in body["messages"]] for body in scripted.bodies)  # type: ignore[attr-defined]
    assert (first, third) == (["be brief", "first"], ["be brief", "third"])
    assert second == ["be brief", "first", "one", "second"]
    assert scripted.bodies[0]["max_completion_tokens"] == 9
    assert scripted.bodies[0]["stop"] == ["x"]
    assert "temperature" not in scripted.bodies[0]


async def test_one_message_is_asked_without_a_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("never read\n"))
    async with router(whole(piece(1, "Paris.", reason="stop"), DONE)) as (scripted, url):
        assert await asyncio.to_thread(main, ["chat", "/help\nme: where?", "--url", url]) == 0
    assert capsys.readouterr().out == "Paris.\n"
    assert [body["messages"] for body in scripted.bodies] == [[{"role": "user", "content": "/help\nme: where?"}]]


LOOP = [piece(position, "Fine. ") for position in range(1, 100)]


async def test_an_answer_that_only_repeats_itself_is_stopped_and_the_chat_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = whole(piece(1, "two", reason="stop"), DONE)
    async with router(whole(*LOOP, DONE), rest) as (scripted, url):
        monkeypatch.setattr(sys, "stdin", io.StringIO("first\nsecond\n"))
        assert await asyncio.to_thread(main, ["chat", "--url", url]) == 0
    out, err = capsys.readouterr()
    shown, second = out.splitlines()
    assert (set(shown.split()), second) == ({"Fine."}, "two")
    assert 512 <= len(shown) < 520
    assert err == (
        "baton: stopped this answer because it only repeats itself; --allow-repetition lets such answers go on\n"
    )
    assert scripted.bodies[1]["messages"][1]["content"] == shown  # type: ignore[index]


async def test_repetition_may_be_allowed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async with router(whole(*LOOP, DONE)) as (_, url):
        monkeypatch.setattr(sys, "stdin", io.StringIO("first\n"))
        assert await asyncio.to_thread(main, ["chat", "--url", url, "--allow-repetition"]) == 0
    assert capsys.readouterr() == ("Fine. " * 99 + "\n", "")


@pytest.mark.parametrize(
    ("answer", "code", "message"),
    [
        (refusal(401, message="no key", type="authentication_error"), 4, "no key"),
        (refusal(400, message="top_p: is 3", type="invalid_request_error", param="top_p"), 2, "top_p: is 3"),
        (
            b"HTTP/1.1 404 No\r\ncontent-length: 2\r\n\r\nhi",
            5,
            "not as a router does: is this the router's HTTP address?",
        ),
        (b"SSH-2.0-x\r\n\r\n", 5, "does not answer"),
    ],
)
async def test_an_error_is_one_line(
    answer: bytes, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with router(answer) as (_, url):
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
        assert await asyncio.to_thread(main, ["chat", "--url", url]) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("baton: ")
    assert message in err


async def test_a_connection_that_breaks_in_an_answer_is_said_to_break() -> None:
    promised = HEAD.replace(b"connection: close", b"content-length: 9999")
    async with router(promised + piece(1, "a").encode()) as (_, url):
        client = ChatClient([Endpoint.parse(url)], Access(""), Random(1), lambda: True, print)
        with pytest.raises(Unreachable, match=f"could not be continued: the connection to {url} broke: "):
            await asyncio.to_thread(list, client.answer({"messages": []}))


def test_endpoints_are_parsed_from_urls() -> None:
    assert Endpoint.parse("https://h/v1") == Endpoint("h", 443, True)
    assert str(Endpoint.parse("http://[::1]:80/x/")) == "http://[::1]:80/x"
    for url in ("h:80", "ftp://h", "http://", "http://h:port"):
        with pytest.raises(UsageError, match="--url"):
            Endpoint.parse(url)


def test_error_objects_become_typed_errors() -> None:
    assert isinstance(error_from_object({"message": "m", "type": "rate_limit_error"}), QuotaExceeded)
    assert isinstance(
        error_from_object({"message": "m", "type": "invalid_request_error", "code": "not_found"}), RequestNotFound
    )
    unknown = error_from_object({"message": "model: no", "type": "x", "code": "model_not_found", "param": "model"})
    assert not isinstance(unknown, InvalidRequest), "its type says what it is"
    unknown = error_from_object(
        {"message": "model: no", "type": "invalid_request_error", "code": "model_not_found", "param": "model"}
    )
    assert (type(unknown), str(unknown)) == (UnknownModel, "model: no")
    assert isinstance(error_from_object({"message": "m", "type": "authentication_error"}), Unauthenticated)
    for body in (b"", b"[]", b"{}", b'{"error": 1}'):
        assert isinstance(error_from_response(500, body, Endpoint("h", 1, False)), Unreachable)


@pytest.mark.parametrize("data", ["x", "[]", '{"choices":[{}]}', '{"choices":[1]}', "1"])
def test_invalid_data_is_not_an_answer(data: str) -> None:
    with pytest.raises(Unreachable, match="not an answer to a chat"):
        EventReader(0).read_data(data)
