"""The HTTP front over a scripted request handler: no sockets, no nodes, no waiting."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from random import Random

from baton.messages.generation import Chunk, Finished, GenerateEvent, GenerateRequest, ModelCard
from baton.messages.generation import Path as Route
from baton.messages.node_model import GENERATES_AND_EMBEDS
from baton.messages.pooling import ModelPooling
from baton.security.http_access import PageAuthenticator
from baton.security.keys import KeyRing, new_key, write_keys
from baton.security.matrix import CallerRole
from baton.text.chat_template import DEFAULT_TEMPLATE
from baton.text.model_template import ModelTemplate
from baton.text.prompt_template import PromptTemplate
from router.admission.prompt_inputs import ImageRules
from router.handler import Handler
from router.http.app import HttpFront
from router.http.audio.endpoint import SpeechRules
from router.http.model import ServedModel
from router.http.pages.status import adapter_routes
from router.http.responses.store import ResponseStore, StoreBounds
from tests.doubles.fake_adapter_handler import FakeAdapterHandler
from tests.doubles.fake_clock import FakeClock
from tests.doubles.fake_handler import FakeCall, FakeHandler
from tests.doubles.fake_tokenizer import FakeTokenizer
from tests.doubles.fake_workers import FakeWorkers
from tests.support.http_client import AsgiClient, Exchange
from tests.support.router_parts import MODEL

NOW = datetime(2026, 1, 2)
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES, EMBEDDINGS = "/v1/responses", "/v1/messages", "/v1/embeddings"
HI: Sequence[Mapping[str, object]] = [{"role": "user", "content": "hi"}]
HELLO: dict[str, object] = {"messages": HI}
STREAM: dict[str, object] = {"stream": True}
CARD = ModelCard(MODEL, 64, 300, embedding_size=2, fingerprint="fp_0123456789ab", capabilities=GENERATES_AND_EMBEDS)
CROSS = replace(CARD, pooling=ModelPooling(labels=("LABEL_0",), is_encoder=True, has_token_types=True))
"""A cross-encoder."""
BOUNDS = StoreBounds(stored_responses=100, stored_response_memory=64 << 20, stored_response_s=60.0)


class HttpRig(AsgiClient):
    """Sends requests to the HTTP front and hands out the calls that its handler receives."""

    def __init__(
        self,
        keep_alive_s: float = 1000.0,
        template: str = DEFAULT_TEMPLATE,
        card: ModelCard = CARD,
        authenticator: PageAuthenticator | None = None,
        bounds: StoreBounds = BOUNDS,
        request_template: Callable[[str], PromptTemplate] | None = None,
        vocabulary: FakeTokenizer | None = None,
        prompt_embeds_bytes: int = 0,
        speech: SpeechRules | None = None,
        image_rules: ImageRules | None = None,
    ) -> None:
        self._image_rules = image_rules
        self.card = card
        self.clock = FakeClock(5.0)
        self.store = ResponseStore(bounds, self.clock)
        self._page_authenticator = authenticator
        self._request_template = request_template
        self._prompt_embeds_bytes = prompt_embeds_bytes
        self._speech = speech
        self._vocabulary = vocabulary or FakeTokenizer()
        self.handler = FakeHandler()
        self.adapters = FakeAdapterHandler()
        self.why_not_ready = ""
        super().__init__(self.front(self.handler, keep_alive_s, template))

    def front(self, handler: Handler, keep_alive_s: float, template: str) -> HttpFront:
        own = ModelTemplate(template, {}, workers=FakeWorkers())
        model = ServedModel(
            lambda: self.card,
            self._vocabulary,
            own,
            lambda: NOW,
            self._request_template,
            image_rules=self._image_rules,
        )
        return HttpFront(
            handler,
            model,
            lambda: self.why_not_ready,
            lambda: b"figures\n",
            self.clock,
            Random(1),
            self.store,
            keep_alive_s,
            self._page_authenticator,
            prompt_embeds_bytes=self._prompt_embeds_bytes,
            speech=self._speech,
            more_routes=adapter_routes(lambda: self.adapters),
        )

    async def next_call(self) -> FakeCall:
        """Wait for the next call of the handler and return it."""
        return await self.handler.calls.get()

    async def next_calls(self, count: int) -> list[FakeCall]:
        return [await self.next_call() for _ in range(count)]

    async def asked(
        self,
        path: str,
        body: Mapping[str, object] | bytes,
        headers: Mapping[str, str] | None = None,
        end: Finished | None = None,
    ) -> GenerateRequest:
        """Send a body; return the request that the core gets for it, whose answer must be a success.

        `end`: what the core answers; by default, the end of an empty text.
        """
        exchange = self.post(path, body, headers)
        call = await self.next_call()
        call.tell(end or finished())
        await exchange.end()
        assert exchange.status == 200, exchange.body
        return call.request

    async def answered(
        self,
        path: str,
        body: Mapping[str, object] | bytes,
        *events: GenerateEvent | Exception | None,
        headers: Mapping[str, str] | None = None,
    ) -> Exchange:
        """Send a body, and let the core answer its one request with these events; return the exchange at its end."""
        exchange = self.post(path, body, headers)
        (await self.next_call()).tell(*events)
        return await exchange.end()

    async def refused(
        self,
        path: str,
        body: Mapping[str, object] | bytes,
        param: str | None,
        says: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Exchange:
        """Send a body that is refused by OpenAI's error for this field, before the core is asked anything.

        `says`: words of the message.
        """
        return await self.refuses(self.post(path, body, headers), param, says)

    async def refuses(self, exchange: Exchange, param: str | None, says: str = "") -> Exchange:
        """Wait for the end of an exchange, which must be such a refusal."""
        await exchange.end()
        assert (exchange.status, exchange.error["param"]) == (400, param), exchange.error
        assert exchange.error["type"] == "invalid_request_error"
        assert says in exchange.error["message"]
        assert self.handler.calls.empty()
        return exchange


def text_of(token_ids: str | Sequence[int] | None) -> str:
    """The letters whose code points are these tokens."""
    return "".join(map(chr, token_ids or ()))  # type: ignore[arg-type]


def vector(*numbers: float) -> Finished:
    """The end of a request for a vector."""
    return replace(finished("stop", 0), embedding=struct.pack(f"<{len(numbers)}f", *numbers))


def authenticator(folder: Path, *tenants: str) -> tuple[PageAuthenticator, list[str]]:
    """An authenticator with a file of keys in this folder, and a client's key for each tenant."""
    made = [new_key(tenant, CallerRole.CLIENT, "") for tenant in tenants]
    write_keys(folder / "keys", [entry for _, entry in made])
    return PageAuthenticator("127.0.0.1", "", KeyRing(folder / "keys")), [key for key, _ in made]


def chunk(first_index: int, text: str, sequence_index: int = 0) -> Chunk:
    """Return a chunk with one token for each letter."""
    return Chunk(first_index, tuple(map(ord, text)), text, (), sequence_index)


def finished(reason: str = "length", completion_tokens: int = 2) -> Finished:
    path = Route("p1", "d1", 1, "the only pair")
    return Finished(reason, None, 3, completion_tokens, 1, 0.0, 0.0, 0.0, 0.0, 0.0, 0, path)
