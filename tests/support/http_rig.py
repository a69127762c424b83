"""The HTTP front over a scripted request handler: no sockets, no nodes, no waiting."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from random import Random

from baton.messages.capabilities import GENERATES_AND_EMBEDS
from baton.messages.generation import Chunk, Finished, ModelCard, Path
from baton.security.pages import PageAuthenticator
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
from tests.support.http_client import AsgiClient
from tests.support.router_parts import MODEL

NOW = datetime(2026, 1, 2)
CARD = ModelCard(MODEL, 64, 300, embedding_size=2, fingerprint="fp_0123456789ab", capabilities=GENERATES_AND_EMBEDS)
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


def chunk(first_index: int, text: str, sequence_index: int = 0) -> Chunk:
    """Return a chunk with one token for each letter."""
    return Chunk(first_index, tuple(map(ord, text)), text, (), sequence_index)


def finished(reason: str = "length", completion_tokens: int = 2) -> Finished:
    path = Path("p1", "d1", 1, "the only pair")
    return Finished(reason, None, 3, completion_tokens, 1, 0.0, 0.0, 0.0, 0.0, 0.0, 0, path)
