"""A router's dispatcher over scripted nodes and a clock moved by hand: no sockets, no waiting, no registry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any, TypeVar

import pytest

from baton.errors import Cancelled
from baton.messages.generation import Accepted, Chunk, Finished, GenerateEvent, GenerateRequest, ModelCard
from baton.messages.ids import AttemptKey
from baton.messages.node import Abort, Adopt, LoadReport, NodeDescription, Outcome, RequestDelta, StageTimings, Submit
from baton.messages.sampling import TokenLogprobs
from router.admission.limits import DispatchLimits
from router.admission.request import ValidRequest
from router.dispatcher import Dispatcher
from router.flight.flight_record import FlightJournal
from router.flight.timeline import RequestSpans
from router.live_requests import LiveRequests
from router.node_links import NodeLinks
from router.placement.placement import Placement
from router.placement.placer import Placer
from router.placement.reasons import IN_TURN
from router.placement.view import ClusterView
from tests.doubles.fake_flight_records import FakeFlightRecords, FakeFlightStore
from tests.doubles.fake_node import FakeNode, FakeNodes
from tests.doubles.fake_timers import FakeTimers
from tests.doubles.fake_tokenizer import FakeTokenizer
from tests.support.router_parts import MODEL, record_of

Raised = TypeVar("Raised", bound=BaseException)


class Reader:
    """A client that reads its stream to the end in its own task."""

    def __init__(self, events: AsyncGenerator[GenerateEvent, None]) -> None:
        self.events: list[GenerateEvent] = []
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(self._read(events))

    async def _read(self, events: AsyncGenerator[GenerateEvent, None]) -> Finished:
        async for event in events:
            self.events.append(event)
            self._changed.set()
        last = self.events[-1]
        assert isinstance(last, Finished)
        return last

    async def finished(self) -> Finished:
        """Wait for the end of the stream and return it; raises the stream's error."""
        return await self.task

    async def raises(self, kind: type[Raised], match: str | None = None) -> Raised:
        """Wait for the end of the stream, which must be such an error, and return the error."""
        with pytest.raises(kind, match=match) as caught:
            await self.task
        return caught.value

    async def leaves(self) -> None:
        """Close the connection in mid-stream."""
        await all_leave(self)

    async def wait_for_tokens(self, count: int) -> None:
        """Return once the client has `count` tokens."""
        while len(self.token_ids) < count:
            self._changed.clear()
            await self._changed.wait()

    async def wait_until_accepted(self) -> None:
        """Return once the client has read Accepted."""
        while not self.events:
            self._changed.clear()
            await self._changed.wait()

    @property
    def chunks(self) -> list[Chunk]:
        return [event for event in self.events if isinstance(event, Chunk)]

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def accepted(self) -> Accepted:
        first = self.events[0]
        assert isinstance(first, Accepted)
        return first


async def all_leave(*readers: Reader) -> None:
    """Close the connections of these clients at once."""
    for reader in readers:
        reader.task.cancel()
    ends = await asyncio.gather(*(reader.task for reader in readers), return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends


class RouterRig:
    """The dispatcher, its nodes by name, and its clock."""

    def __init__(
        self,
        limits: DispatchLimits | None,
        placer: Placer | None = None,
        spans: RequestSpans | None = None,
        codec: FakeTokenizer | None = None,
    ) -> None:
        self.timers = FakeTimers()
        self.view = ClusterView()
        self.fakes = FakeNodes()
        self.links = NodeLinks(self.fakes.connect, "router-1", self.timers, Random(7))
        self.card = ModelCard(MODEL, 64, 300)
        self.store = FakeFlightStore()
        self.dispatcher = Dispatcher(
            self.view,
            self.links,
            codec or FakeTokenizer(),
            lambda: self.card,
            self.timers,
            Random(7),
            limits,
            self.journal("router-1.a"),
            placer,
            spans,
        )
        self.nodes: dict[str, FakeNode] = {}

    def journal(self, router: str) -> FlightJournal:
        """Return the journal of a router of this cluster."""
        return FlightJournal(FakeFlightRecords(self.store, "c"), router, self.timers.monotonic)

    def left_behind(
        self,
        request: ValidRequest,
        attempt: AttemptKey,
        prefill: NodeDescription | None,
        decode: NodeDescription,
        *,
        router: str = "router-0.a",
        takeover: int = 1,
    ) -> None:
        """Write the record that another router left of its attempt on these nodes."""
        self.journal(router).write(request, attempt, Placement(prefill, decode, IN_TURN), takeover=takeover)

    async def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Give the event loop its turns until something is so; ten thousand at most."""
        for _ in range(10_000):
            if is_so():
                return
            await asyncio.sleep(0)
        raise AssertionError("it never was")

    def register(self, *descriptions: NodeDescription) -> None:
        """Put exactly these nodes into the registry."""
        for description in descriptions:
            if description.incarnation not in {node.incarnation for node in self.nodes.values()}:
                self.nodes[description.node_id] = self.fakes.add(FakeNode(description))
        records = [record_of(description) for description in descriptions]
        self.view.registered(records)
        self.links.update(records)

    async def wait_until_attached(self, count: int) -> None:
        """Return once exactly `count` nodes are attached."""
        while len(self.view.descriptions()) != count:
            self.requests.changed.clear()
            await self.requests.changed.wait()

    def ask(self, prompt: str | Sequence[int] = "hello", timeout_s: float | None = None, **fields: object) -> Reader:
        return Reader(self.dispatcher.generate(GenerateRequest(prompt, **fields), timeout_s))  # type: ignore[arg-type]

    async def accepted(self, prompt: str | Sequence[int] = "hello", **fields: Any) -> Reader:
        """Send a request, and return its reader once it has Accepted."""
        reader = self.ask(prompt, **fields)
        await reader.wait_until_accepted()
        return reader

    async def start(self, prompt: str | Sequence[int] = "hello", **fields: Any) -> tuple[Reader, AttemptKey]:
        """Send a request, whose legs the nodes p1 and d1 get."""
        reader = self.ask(prompt, **fields)
        return reader, await self.next_attempt("p1", "d1")

    async def streaming(self, text: str, **fields: Any) -> tuple[Reader, AttemptKey]:
        """Send a request to p1 and d1; p1 hands off the first letter of the text, and d1 generates the others."""
        reader, attempt = await self.start(**fields)
        self.report("p1", attempt, 0, text[0], Outcome.HANDED_OFF)
        self.report("d1", attempt, 1, text[1:])
        await reader.wait_for_tokens(len(text))
        return reader, attempt

    async def cancel(self, *readers: Reader) -> None:
        """Cancel requests by their ids."""
        for reader in readers:
            self.dispatcher.cancel(reader.accepted.request_id)
            await reader.raises(Cancelled)

    def resume(
        self, request_id: str, *positions: int, timeout_s: float | None = None, call: int = 0, **fields: object
    ) -> Reader:
        """Resume a request as a client that comes back; with `fields` it sends its request again."""
        repeat = GenerateRequest(**fields) if fields else None  # type: ignore[arg-type]
        return Reader(self.dispatcher.resume(request_id, positions, timeout_s, call=call, repeat=repeat))

    async def next_adopts(self, *names: str) -> AttemptKey:
        """Return the attempt whose Adopts are the next messages to these nodes."""
        (attempt,) = {await self.next_adopt(name) for name in names}
        return attempt

    async def next_adopt(self, name: str) -> AttemptKey:
        """Return the attempt of the next message to a node, which must be an Adopt."""
        message = await self.nodes[name].inbox.get()
        assert isinstance(message, Adopt), message
        return message.attempt

    async def next_submit(self, name: str) -> Submit:
        """Return the next message to a node, which must be a Submit."""
        message = await self.nodes[name].inbox.get()
        assert isinstance(message, Submit), message
        return message

    async def next_attempt(self, *names: str) -> AttemptKey:
        """Return the attempt whose legs are the next messages to these nodes."""
        (attempt,) = {(await self.next_submit(name)).attempt for name in names}
        return attempt

    async def next_aborts(self, *names: str) -> AttemptKey:
        """Return the attempt whose Aborts are the next messages to these nodes."""
        (attempt,) = {(await self.next_abort(name)).attempt for name in names}
        return attempt

    async def next_abort(self, name: str) -> Abort:
        """Return the next message to a node, which must be an Abort."""
        message = await self.nodes[name].inbox.get()
        assert isinstance(message, Abort), message
        return message

    def report(
        self,
        name: str,
        attempt: AttemptKey,
        first_index: int = 0,
        text: str = "",
        outcome: Outcome | None = None,
        timings: StageTimings | None = None,
        stop_token_id: int | None = None,
        sequence_index: int = 0,
        logprob: float | None = None,
        takeover: int = 0,
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        """Let a node report a step with one token for each letter of `text`."""
        tokens = tuple(ord(letter) for letter in text)
        logprobs = [] if logprob is None else [TokenLogprobs(token, logprob, 1, ()) for token in tokens]
        self.nodes[name].report(
            RequestDelta(
                attempt,
                first_index,
                tokens,
                logprobs,
                outcome,
                stop_token_id,
                timings=timings,
                sequence_index=sequence_index,
                takeover=takeover,
                prompt_logprobs=prompt_logprobs,
            )
        )

    async def tell_all(self, *names: str, **load: Any) -> None:
        """Let each of these nodes report this load, and the router read all that they have told so far."""
        for name in names:
            self.nodes[name].report(load=LoadReport(**load))
            await self.nodes[name].all_read()

    async def serve(self, *names: str, text: str = "a") -> None:
        """Let the next leg of each of these nodes, one after the other, generate this text to the end."""
        for name in names:
            self.report(name, await self.next_attempt(name), 0, text, Outcome.LENGTH)

    async def end(self, reader: Reader, name: str, attempt: AttemptKey, first_index: int, text: str) -> Finished:
        """Let a node generate the last tokens of a request, and wait for the end."""
        self.report(name, attempt, first_index, text, Outcome.LENGTH)
        return await reader.finished()

    async def finish(
        self, reader: Reader, attempt: AttemptKey, text: str, *, prefill: str = "p1", decode: str = "d1"
    ) -> Finished:
        """Let the prefill node hand off the first token and the decode node generate the rest; wait for the end."""
        self.report(prefill, attempt, 0, text[0], Outcome.HANDED_OFF)
        return await self.end(reader, decode, attempt, 1, text[1:])

    @property
    def requests(self) -> LiveRequests:
        return self.dispatcher.requests

    def in_flight(self) -> float:
        """Return the number of legs that the router believes to be running on attached nodes."""
        return sum(candidate.load for candidate in self.view.candidates())


@asynccontextmanager
async def router_rig(
    *descriptions: NodeDescription,
    limits: DispatchLimits | None = None,
    placer: Placer | None = None,
    spans: RequestSpans | None = None,
    codec: FakeTokenizer | None = None,
) -> AsyncIterator[RouterRig]:
    """Yield a rig with these nodes attached; checks at the end that no request, timer, task or client is left."""
    before = asyncio.all_tasks()
    rig = RouterRig(limits, placer, spans, codec)
    rig.register(*descriptions)
    await rig.wait_until_attached(len(descriptions))
    try:
        yield rig
        assert rig.requests.num_live == 0
        assert rig.in_flight() == 0
        assert rig.requests.placer.is_idle
    finally:
        await rig.links.close()
    assert asyncio.all_tasks() == before
    assert rig.timers.num_pending == 0
    assert rig.fakes.num_open_clients == 0
