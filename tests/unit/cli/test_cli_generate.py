"""The options of `baton generate` that say what the text must be, as fields of the request that a router gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.cli.main import main
from baton.messages.generation import GenerateRequest
from baton.messages.sampling import CONSTRAINT_KINDS
from baton.wire.server.server import RpcServer
from baton.wire.services import generation_service
from baton.wire.services.generation_service import GenerationServicer
from tests.doubles.fake_generation_handler import FakeGenerationHandler

GRAMMAR = 'start: item ("," item)*\nitem: /[0-9]+/\n'
GENERATE = ("generate", "hello", "--address", "127.0.0.1:9")
"""Nothing listens at this address: what is refused is refused before the router is asked."""


@asynccontextmanager
async def router() -> AsyncIterator[tuple[FakeGenerationHandler, str]]:
    handler, server = FakeGenerationHandler(), RpcServer((generation_service.SERVICE_NAME,))
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    GenerationServicer(handler).add_to_server(server.server)
    await server.start()
    try:
        yield handler, address
    finally:
        await server.stop(0)


def grammar_file(directory: Path) -> str:
    (directory / "list.lark").write_text(GRAMMAR)
    return f"@{directory / 'list.lark'}"


@pytest.mark.parametrize(
    ("words", "kind", "value"),
    [
        (["--json-schema", "{}"], "json_schema", "{}"),
        (["--regex", "@[a-z]+"], "regex", "@[a-z]+"),
        (["--choice", "yes", "--choice", "@no"], "choice", ["yes", "@no"]),
        (["--grammar", GRAMMAR], "grammar", GRAMMAR),
        (["--grammar", "FILE"], "grammar", GRAMMAR),
    ],
)
async def test_the_router_is_sent_what_the_text_must_be(
    tmp_path: Path, words: list[str], kind: str, value: object
) -> None:
    words = [grammar_file(tmp_path) if word == "FILE" else word for word in words]
    async with router() as (handler, address):
        assert await asyncio.to_thread(main, ["generate", "hello", "--address", address, *words]) == 0
    (request,) = handler.requests
    assert isinstance(request, GenerateRequest)
    sent = {name: found for name in CONSTRAINT_KINDS if (found := getattr(request, name))}
    assert {name: found if isinstance(found, str) else list(found) for name, found in sent.items()} == {kind: value}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--regex", "a", "--choice", "b"], "--regex and --choice don't go together: use one of them"),
        (
            ["--json-schema", "{}", "--grammar", "@none"],
            "--json-schema and --grammar don't go together: use one of them",
        ),
        (["--regex", "", "--grammar", "x"], "--regex and --grammar don't go together: use one of them"),
        (["--json-schema", ""], "--json-schema: an empty text constrains nothing; leave the option out"),
        (["--regex", ""], "--regex: an empty text constrains nothing; leave the option out"),
        (["--choice", "a", "--choice", ""], "--choice: an empty text constrains nothing; leave the option out"),
        (["--grammar", "@/no/such.lark"], "--grammar: /no/such.lark can't be read ([Errno 2]"),
        (["--grammar", "@/dev/null"], "--grammar: /dev/null is empty"),
    ],
)
def test_what_can_not_be_meant_is_refused_before_a_router_is_asked(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main([*GENERATE, *words]) == 2
    assert message in capsys.readouterr().err
