"""The methods that the router's services call, as far as they are not the dispatcher's."""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from random import Random

import pytest

from baton.errors import InvalidRequest, QueueFull, UnknownModel
from baton.messages.generation import ModelCard
from baton.security.matrix import Caller, CallerRole, current_caller
from baton.text.detokenizer import TextCodec
from router.admission.limits import DispatchLimits
from router.dispatcher import Dispatcher
from router.front import GenerationHandler
from router.node_links import NodeLinks
from router.placement.view import ClusterView
from tests.doubles.fake_node import FakeNodes
from tests.doubles.fake_timers import FakeTimers
from tests.doubles.fake_tokenizer import FakeDetokenizer, FakeTokenizer
from tests.support.router_parts import MODEL

LONG_S = 30.0
CARD = ModelCard(MODEL, 64, 300)


class SlowCodec(FakeTokenizer):
    """A tokenizer that waits until the event loop releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()

    def _wait(self) -> None:
        if not self.may_go_on.wait(LONG_S):
            raise TimeoutError("the event loop stood still")

    def encode_rendered(self, text: str) -> list[int]:
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        self._wait()
        return [len(text)]

    def decode(self, token_ids: Sequence[int]) -> str:
        self._wait()
        return str(list(token_ids))

    def detokenizer(self, shown_tokens: Sequence[int] = (), context: Sequence[int] = ()) -> FakeDetokenizer:
        raise NotImplementedError


def dispatcher(codec: TextCodec | None, limits: DispatchLimits | None = None) -> Dispatcher:
    timers, view = FakeTimers(), ClusterView()
    links = NodeLinks(FakeNodes().connect, "router-1", timers, Random(1))
    return Dispatcher(view, links, codec, lambda: CARD, timers, Random(1), limits)


def handler(codec: TextCodec | None, limits: DispatchLimits | None = None) -> GenerationHandler:
    return GenerationHandler(dispatcher(codec, limits), codec, lambda: CARD)


async def test_a_long_text_delays_no_other_request() -> None:
    codec = SlowCodec()
    front = handler(codec)
    waiting = [asyncio.create_task(front.tokenize("", "four")), asyncio.create_task(front.detokenize("", [4, 5]))]
    await asyncio.wait(waiting, timeout=0)
    codec.may_go_on.set()
    assert await asyncio.gather(*waiting) == [[4], "[4, 5]"]


async def test_texts_share_few_threads_and_tenants_take_turns() -> None:
    codec = SlowCodec()
    front = handler(codec, DispatchLimits(max_tokenizing=8))
    begun: queue.SimpleQueue[str] = queue.SimpleQueue()

    def work(name: str) -> str:
        begun.put(name)
        codec.encode("")
        return name

    async def ask(tenant: str, name: str) -> str:
        current_caller.set(Caller(CallerRole.CLIENT, tenant))
        return await front.in_thread(work, name)

    flood = [asyncio.create_task(ask("a", f"a{number}")) for number in range(1)]
    assert await asyncio.to_thread(begun.get, timeout=LONG_S) == "a0"
    flood += [asyncio.create_task(ask("a", f"a{number}")) for number in range(1, 3)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="2 jobs of this tenant wait, and at most 2 may"):
        await ask("a", "a3")
    other = asyncio.create_task(ask("b", "b0"))
    assert await asyncio.to_thread(begun.get, timeout=LONG_S) == "b0"
    codec.may_go_on.set()
    assert await other == "b0"
    assert await asyncio.gather(*flood) == ["a0", "a1", "a2"]


async def test_what_is_refused_in_a_thread_is_freed_without_the_collector(request: pytest.FixtureRequest) -> None:
    """A body in a cycle would stay until the next full collection, which holds the event loop to free them all."""

    class Body:
        pass

    def refuse(body: Body) -> None:
        raise InvalidRequest("prompt", "is wrong")

    async def refused(served: Dispatcher) -> weakref.ref[Body]:
        body = Body()
        with suppress(InvalidRequest):
            await served.in_thread("", refuse, body)
        return weakref.ref(body)

    request.addfinalizer(gc.enable)
    gc.disable()
    served = dispatcher(SlowCodec())
    gone = await refused(served)
    served.close()  # its threads have ended, so none of them has the body
    await asyncio.sleep(0)  # nor has the call with which the loop continued this task
    assert gone() is None


async def test_more_tokens_than_the_model_takes_are_not_detokenized() -> None:
    with pytest.raises(InvalidRequest, match="token_ids: has 65 entries; at most 64 are taken"):
        await handler(SlowCodec()).detokenize("", [1] * 65)


async def test_invalid_text_and_token_ids_are_refused_by_name() -> None:
    front = handler(SlowCodec())
    with pytest.raises(UnknownModel, match="model"):
        await front.tokenize("another", "x")
    with pytest.raises(InvalidRequest, match="text: is not valid UTF-8"):
        await front.tokenize("", "a\ud800b")
    with pytest.raises(InvalidRequest, match="token_ids: token 1"):
        await front.detokenize("", [1, 300])
    with pytest.raises(InvalidRequest, match="without a tokenizer"):
        await handler(None).tokenize("", "x")
