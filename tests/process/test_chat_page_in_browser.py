"""The chat page and the reference of the API in a browser: what a person does there, and what a hostile model can't."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.errors import EngineFault
from baton.security.keys import KeyRing, new_key, write_keys
from baton.security.matrix import CallerRole
from baton.security.pages import PageAuthenticator
from baton.text.chat_template import DEFAULT_TEMPLATE
from router.http.openapi import OPERATIONS
from router.http.server import HttpServer
from tests.support.browser import Browser
from tests.support.http_rig import CARD, HttpRig, chunk, finished

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
HOSTILE = "<img src=x onerror=window.pwned=1><script>window.pwned=1</script> [x](javascript:window.pwned=1)"
MARKDOWN = "# Title\n\n- one\n- **two**\n\n```python\nx = '<b>'\n```\n\n[docs](https://example.org/a)\n\n" + HOSTILE
SIZES = [(1280, "light"), (400, "dark")]
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


class Page:
    """The page in the browser, and the server behind it."""

    def __init__(self, browser: Browser, rig: HttpRig, url: str) -> None:
        self.browser = browser
        self.rig = rig
        self.url = url

    async def do(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do something in the browser while the server answers."""
        return await asyncio.to_thread(work, *arguments)

    async def read(self, script: str) -> Any:
        return await self.do(self.browser.run, script)

    async def until(self, condition: str) -> None:
        """Wait until this JavaScript expression is true."""
        look = f"const look = () => ({condition}) ? done(true) : requestAnimationFrame(look); look();"
        await self.read(f"new Promise(done => {{ {look} }})")

    async def open(self, width: int = 1280, scheme: str = "light") -> None:
        await self.do(self.browser.visit, self.url, width, 860, scheme)
        await self.until("byId('model').textContent !== 'connecting'")

    async def say(self, text: str) -> None:
        """Type a message, and send it with Enter."""
        await self.read("byId('prompt').focus()")
        await self.do(self.browser.type, text)
        await self.do(self.browser.press, "Enter")


@asynccontextmanager
async def opened(
    chromium: Browser, template: str = TEMPLATE, authenticator: PageAuthenticator | None = None
) -> AsyncIterator[Page]:
    rig = HttpRig(template=template, card=replace(CARD, max_model_len=2048), authenticator=authenticator)
    server = HttpServer(rig.front(rig.handler, 1000.0, template))
    port = server.bind("127.0.0.1", 0)
    await server.start()
    try:
        yield Page(chromium, rig, f"http://127.0.0.1:{port}/")
        await asyncio.to_thread(chromium.leave)
    finally:
        await server.stop(1.0)


def text_of(prompt: Any) -> str:
    return "".join(map(chr, prompt))


@pytest.mark.parametrize(("width", "scheme"), SIZES)
async def test_an_answer_is_streamed_and_drawn_without_any_markup_of_the_models(
    chromium: Browser, width: int, scheme: str
) -> None:
    async with opened(chromium) as page:
        await page.open(width, scheme)
        await page.read(
            "byId('system').value = 'Be brief.'; byId('temperature').value = '0.5'; byId('seed').value = '7'"
        )
        await page.say(HOSTILE)
        call = await page.rig.next_call()
        assert call.request is not None
        assert text_of(call.request.prompt) == f"<system>Be brief.<user>{HOSTILE}"
        assert (call.request.temperature, call.request.seed, call.request.top_p) == (0.5, 7, None)
        half = len(MARKDOWN) // 2
        call.tell(chunk(0, MARKDOWN[:half]))
        await page.until("document.querySelector('.pending .text h3')")
        assert await page.read("[byId('stop').hidden, byId('send').hidden]") == [False, True]
        call.tell(chunk(half, MARKDOWN[half:]), finished("stop", 42))
        await page.until("!running")
        assert await page.read("document.querySelector('.assistant h3').textContent") == "Title"
        assert await page.read("[...document.querySelectorAll('.assistant li')].map(one => one.textContent)") == [
            "one",
            "two",
        ]
        assert await page.read("document.querySelector('.assistant pre').textContent") == "x = '<b>'"
        assert await page.read("[...document.querySelectorAll('.assistant a')].map(one => one.href)") == [
            "https://example.org/a"
        ]
        assert (await page.read("document.querySelector('.under').textContent")).startswith("42 tokens, ")
        # What the model and the person wrote is text.
        assert await page.read("document.querySelector('.user .text').textContent") == HOSTILE
        assert HOSTILE in await page.read("document.querySelector('.assistant .text').textContent")
        assert await page.read("window.pwned === undefined && !document.querySelector('main img, main script')")
        assert chromium.complaints == []
        assert chromium.requests == [page.url, f"{page.url}v1/models", f"{page.url}v1/chat/completions"]
        assert await page.read(OVERFLOW) == 0


async def test_a_chat_goes_on_and_an_answer_is_made_again(chromium: Browser) -> None:
    async with opened(chromium) as page:
        await page.open()
        await page.say("a")
        (await page.rig.next_call()).tell(chunk(0, "b"), finished("stop"))
        await page.until("!running")
        await page.say("c")
        call = await page.rig.next_call()
        assert call.request is not None
        assert text_of(call.request.prompt) == "<user>a<assistant>b<user>c"
        call.tell(chunk(0, "d"), finished("length"))
        await page.until("!running")
        assert "ended at max tokens" in await page.read("turns[3].underPart.textContent")
        await page.read("[...turns[3].underPart.querySelectorAll('button')].pop().click()")
        again = await page.rig.next_call()
        assert again.request is not None
        assert text_of(again.request.prompt) == "<user>a<assistant>b<user>c"
        again.tell(chunk(0, "e"), finished("stop"))
        await page.until("!running")
        assert await page.read("turns.map(turn => turn.text)") == ["a", "b", "c", "e"]
        await page.read("byId('new').click()")
        assert await page.read("[turns.length, document.querySelectorAll('.turn').length]") == [0, 0]


async def test_escape_stops_an_answer_at_the_router_too(chromium: Browser) -> None:
    async with opened(chromium) as page:
        await page.open()
        await page.say("a")
        call = await page.rig.next_call()
        call.tell(chunk(0, "begun"))
        await page.until("document.querySelector('.assistant p')")
        await page.do(chromium.press, "Escape")
        await call.is_closed.wait()
        await page.until("!running")
        assert await page.read("turns[1].text") == "begun"
        assert "stopped" in await page.read("turns[1].underPart.textContent")
        assert await page.read("document.querySelectorAll('.error').length") == 0


async def test_an_answer_that_only_repeats_itself_is_stopped_at_the_router_too(chromium: Browser) -> None:
    async with opened(chromium) as page:
        await page.open()
        await page.say("a")
        call = await page.rig.next_call()
        call.tell(chunk(0, "Fine. " * 100))
        await call.is_closed.wait()
        await page.until("!running")
        assert "stopped because it only repeats itself" in await page.read("turns[1].underPart.textContent")
        await page.read("byId('stop_loops').click()")
        await page.say("b")
        call = await page.rig.next_call()
        call.tell(chunk(0, "Fine. " * 100), finished("stop"))
        await page.until("!running")
        assert "repeats" not in await page.read("turns[3].underPart.textContent")


async def test_shift_and_enter_begin_a_line(chromium: Browser) -> None:
    async with opened(chromium) as page:
        await page.open()
        await page.read("byId('prompt').focus()")
        await page.do(chromium.type, "a")
        await page.do(chromium.press, "Enter", True)
        await page.do(chromium.type, "b")
        assert await page.read("[byId('prompt').value, turns.length]") == ["a\nb", 0]


async def test_errors_are_shown_with_their_text(chromium: Browser) -> None:
    async with opened(chromium) as page:
        await page.open()
        await page.read("byId('temperature').value = '9'")
        await page.say("a")
        call = await page.rig.next_call()
        call.tell(EngineFault(f"NaN {HOSTILE}"))
        await page.until("!running")
        assert HOSTILE in await page.read("document.querySelector('.error').textContent")
        await page.say("b")
        # The roles of the next conversation alternate all the same, as templates of many models demand.
        assert await page.read("body().messages") == [{"role": "user", "content": "a\n\nb"}]
        (await page.rig.next_call()).tell(chunk(0, "x"), EngineFault("broke in the middle"))
        await page.until("!running")
        assert await page.read("turns[3].part.querySelector('.error').textContent") == "broke in the middle"
        assert await page.read("turns[3].text") == "x"


async def test_a_model_without_a_template_continues_a_text(chromium: Browser) -> None:
    async with opened(chromium, DEFAULT_TEMPLATE) as page:
        await page.open()
        assert "no chat template" in await page.read("byId('note').textContent")
        for said, answer in (("def f(", "n):"), (" #", " done")):
            await page.say(said)
            call = await page.rig.next_call()
            call.tell(chunk(0, answer), finished("stop"))
            await page.until("!running")
        assert call.request is not None
        assert (call.request.prompt, call.request.max_tokens) == ("def f(n): #", 256)
        assert chromium.requests[-1] == f"{page.url}v1/completions"


async def test_the_page_is_open_and_its_calls_have_the_key_that_was_typed(chromium: Browser, tmp_path: Path) -> None:
    key, entry = new_key("t", CallerRole.CLIENT, "")
    write_keys(tmp_path / "keys", [entry])
    async with opened(chromium, authenticator=PageAuthenticator("127.0.0.1", "", KeyRing(tmp_path / "keys"))) as page:
        await page.open()
        assert "key" in await page.read("byId('model').textContent")
        assert await page.read("byId('send').disabled")
        await page.read(f"byId('key').value = {json.dumps(key)}; byId('key').onchange()")
        await page.until("model")
        await page.say("a")
        (await page.rig.next_call()).tell(chunk(0, "b"), finished("stop"))
        await page.until("!running")
        assert await page.read("turns[1].text") == "b"
        assert await page.read("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]


async def test_a_key_that_is_taken_back_in_mid_use_is_asked_for_again(chromium: Browser, tmp_path: Path) -> None:
    (old, old_entry), (new, new_entry) = (new_key(name, CallerRole.CLIENT, "") for name in ("old", "new"))
    write_keys(tmp_path / "old", [old_entry])
    write_keys(tmp_path / "new", [new_entry])
    authenticator = PageAuthenticator("127.0.0.1", "", KeyRing(tmp_path / "old"))
    async with opened(chromium, authenticator=authenticator) as page:
        await page.open()
        await page.read(f"byId('key').value = {json.dumps(old)}; byId('key').onchange()")
        await page.until("model")
        authenticator._keys = KeyRing(tmp_path / "new")
        await page.read("byId('settings').hidden = true")
        await page.say("a")
        await page.until("!running")
        assert "Type in a key that is valid" in await page.read("document.querySelector('.error').textContent")
        assert "Type in a key that is valid" in await page.read("byId('model').textContent")
        asked = "[byId('settings').hidden, byId('key').ariaInvalid, document.activeElement === byId('key')]"
        assert await page.read(asked) == [False, "true", True]
        await page.read(f"byId('key').value = {json.dumps(new)}; byId('key').onchange()")
        await page.until("byId('key').ariaInvalid === 'false'")
        await page.read("retry(turns[1])")
        (await page.rig.next_call()).tell(chunk(0, "b"), finished("stop"))
        await page.until("!running")
        assert await page.read("turns.map(turn => turn.text)") == ["a", "b"]


@pytest.mark.parametrize(("width", "scheme"), SIZES)
async def test_the_reference_shows_every_path_and_field(chromium: Browser, width: int, scheme: str) -> None:
    async with opened(chromium) as page:
        await page.do(chromium.visit, f"{page.url}docs", width, 860, scheme)
        await page.until("document.querySelector('article')")
        shown = await page.read("[...document.querySelectorAll('article h3')].map(one => one.textContent)")
        assert sorted(shown) == sorted(f"{one.method}{one.path}" for one in OPERATIONS)
        fields = "[...document.querySelectorAll('#post_v1_chat_completions dt code')].map(one => one.textContent)"
        assert {"messages", "temperature", "include_usage"} <= set(await page.read(fields))
        form = await page.read("document.querySelector('#post_v1_audio_transcriptions pre').textContent")
        assert "-F 'file=@speech.wav'" in form
        assert f"curl {page.url}tokenize" in await page.read("document.querySelector('#post_tokenize pre').textContent")
        await page.read("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        assert await page.read(OVERFLOW) == 0
        assert chromium.complaints == []
        assert chromium.requests == [f"{page.url}docs", f"{page.url}openapi.json"]
