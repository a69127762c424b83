"""The chat page in a browser, with the server behind it and what a person does there."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from baton.messages.generation import ModelCard
from baton.security.http_access import PageAuthenticator
from router.admission.prompt_inputs import ImageRules
from router.http.server import HttpServer
from tests.support.browser import Browser
from tests.support.http_rig import CARD, HttpRig, chunk, finished

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
_MOST_WAITED_MS = 60_000
PASTE = "new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true})"
DROP = "new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true})"


class Page:
    """The page in the browser, and the server behind it."""

    def __init__(self, browser: Browser, rig: HttpRig, address: str) -> None:
        """`address`: of the server, HOST:PORT."""
        self.browser = browser
        self.rig = rig
        self.address = address
        self.url = f"http://{address}/"

    async def do(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do something in the browser while the server answers."""
        return await asyncio.to_thread(work, *arguments)

    async def read(self, script: str) -> Any:
        return await self.do(self.browser.run, script)

    async def until(self, condition: str) -> None:
        """Wait until this JavaScript expression is true. Raises AssertionError if it does not come true."""
        # It ends by itself before a test's own time is over: a thread that waits for the browser would keep the test.
        script = f"""new Promise(done => {{
          const begun = performance.now(), isOver = () => performance.now() - begun > {_MOST_WAITED_MS};
          const look = () => (({condition}) ? done(true) : isOver() ? done(false) : requestAnimationFrame(look));
          look();
        }})"""
        assert await self.read(script), condition

    async def open(self, width: int = 1280, scheme: str = "light") -> None:
        await self.do(self.browser.visit, self.url, width, 860, scheme)
        await self.ready()

    async def ready(self) -> None:
        """Wait until the page has its models and its conversations."""
        await self.until("byId('model').textContent !== 'connecting' && byId('kept').textContent")

    async def reload(self) -> None:
        """Load the same address again, and forget what the page had."""
        url = await self.read("location.href")
        await self.do(self.browser.visit, "about:blank")
        await self.do(self.browser.visit, url)
        await self.ready()

    async def answer(self, text: str, reason: str = "stop") -> str:
        """Answer the next request with this text; returns its prompt."""
        call = await self.rig.next_call()
        assert call.request is not None
        call.tell(chunk(0, text), finished(reason))
        await self.until("!running")
        return text_of(call.request.prompt)

    async def press(self, name: str, place: int) -> None:
        """Click a button of a message, by its text."""
        buttons = f"[...views.get(chat.turns.at({place})).part.querySelectorAll('button')]"
        await self.read(f"{buttons}.find(one => one.textContent === {name!r}).click()")

    async def give(self, event: str, files: dict[str, tuple[str, bytes]]) -> None:
        """Paste or drop files, given by name with media type and content."""
        given = [[name, kind, base64.b64encode(data).decode()] for name, (kind, data) in files.items()]
        await self.read(
            f"""(() => {{
              const data = new DataTransfer();
              for (const [name, type, text] of {json.dumps(given)}) {{
                data.items.add(new File([Uint8Array.from(atob(text), one => one.charCodeAt(0))], name, {{type}}));
              }}
              document.dispatchEvent({event});
            }})()"""
        )

    async def say(self, text: str) -> None:
        """Type a message, and send it with Enter."""
        await self.read("byId('prompt').focus()")
        await self.do(self.browser.type, text)
        await self.do(self.browser.press, "Enter")


@asynccontextmanager
async def opened(
    chromium: Browser,
    template: str = TEMPLATE,
    authenticator: PageAuthenticator | None = None,
    card: ModelCard = CARD,
    image_rules: ImageRules | None = None,
) -> AsyncIterator[Page]:
    card = replace(card, max_model_len=2048)
    rig = HttpRig(template=template, card=card, authenticator=authenticator, image_rules=image_rules)
    server = HttpServer(rig.front(rig.handler, 1000.0, template))
    port = server.bind("127.0.0.1", 0)
    await server.start()
    try:
        yield Page(chromium, rig, f"127.0.0.1:{port}")
        await asyncio.to_thread(chromium.leave)
    finally:
        await server.stop(1.0)


def text_of(prompt: Any) -> str:
    return "".join(map(chr, prompt))
