"""Nodes with real gRPC and a scripted engine: each token is a function of the prompt and the index."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from baton.messages.ids import AttemptKey
from baton.messages.node import (
    Abort,
    Leg,
    LoadReport,
    NodeDescription,
    Outcome,
    RequestDelta,
    RouterMessage,
    StageTimings,
    StepReport,
    Submit,
)
from baton.wire.server.server import RpcServer
from baton.wire.services.node_service import SERVICE_NAME, NodeServicer
from tests.doubles.fake_node_handler import FakeNodeHandler, FakeRouterPort


def token_at(prompt: Sequence[int], index: int) -> int:
    """The token at an output position: the small letters in turn, from one that the prompt chooses."""
    return ord("a") + (sum(prompt) + index) % 26


class AnsweringPort(FakeRouterPort):
    """A port that answers each submitted leg with its tokens."""

    def __init__(self, node: ServedNode, router_id: str, router_incarnation: str, keeps: Sequence[AttemptKey]) -> None:
        super().__init__(node, router_id, router_incarnation, keeps)
        self._node = node

    def receive(self, message: RouterMessage) -> None:
        self._node.received.put_nowait(message)
        if isinstance(message, Submit) and not self._node.is_stuck:
            self.answer(message)

    def refuse(self, attempt: AttemptKey, error: str) -> None:
        delta = RequestDelta(attempt, outcome=Outcome.ERROR, error=error)
        self.queue.put_nowait(StepReport((delta,), LoadReport()))

    def answer(self, submit: Submit, stop: int | None = None) -> None:
        """Send the tokens of the leg; with `stop`, only those up to this output index, without an end."""
        last = submit.spec.sampling_params.max_tokens
        first, end = {Leg.PREFILL: (0, 1), Leg.DECODE: (1, last), Leg.WHOLE: (0, last)}[submit.leg]
        outcome: Outcome | None = Outcome.LENGTH
        if submit.leg is Leg.PREFILL and last > 1:
            outcome = Outcome.HANDED_OFF
        if submit.leg is Leg.DECODE and last == 1:
            return
        if stop is not None:
            end, outcome = stop, None
        for index in range(first, end):
            is_last = index == end - 1
            delta = RequestDelta(submit.attempt, index, (token_at(submit.spec.prompt_token_ids, index),))
            if is_last:
                delta = replace(delta, outcome=outcome, timings=StageTimings(queue_ms=1.0, kv_bytes=10))
            self.queue.put_nowait(StepReport((delta,), LoadReport(total_blocks=4, free_blocks=4)))

    def close(self) -> None:
        super().close()
        self._node.port_closed.set()


class ServedNode(FakeNodeHandler):
    """One incarnation of a node with its own server; `received` has the messages of routers."""

    def __init__(self, description: NodeDescription) -> None:
        self._server = RpcServer((SERVICE_NAME,))
        bound = self._server.bind("127.0.0.1", 0)
        super().__init__(replace(description, address=f"127.0.0.1:{bound}"))
        self.is_stuck = False
        """Whether it takes requests without computing them."""
        self.received: asyncio.Queue[RouterMessage] = asyncio.Queue()
        self.port_opened = asyncio.Event()
        self.port_closed = asyncio.Event()
        self.port: AnsweringPort | None = None
        NodeServicer(self).add_to_server(self._server.server)

    async def start(self) -> None:
        await self._server.start()

    async def kill(self) -> None:
        """Break all connections at once. Idempotent."""
        await self._server.stop(0)

    async def next_submit(self) -> Submit:
        message = await self.received.get()
        assert isinstance(message, Submit), message
        return message

    async def next_abort(self) -> Abort:
        message = await self.received.get()
        assert isinstance(message, Abort), message
        return message

    def open_port(self, router_id: str, router_incarnation: str, keeps: Sequence[AttemptKey]) -> AnsweringPort:
        self.port = AnsweringPort(self, router_id, router_incarnation, keeps)
        self.port_opened.set()
        return self.port
