"""Several routers over a simulated cluster, and clients that move from one to the other, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from baton.client.continuation import Call, CallKind, Continuation, EndpointRotation, with_id_and_seed
from baton.errors import BatonError, Unreachable
from baton.messages.generation import GenerateEvent, GenerateRequest, ModelCard
from router.admission.limits import DispatchLimits
from router.dispatcher import Dispatcher
from router.flight.flight_record import FlightJournal
from router.node_links import NodeLinks
from router.placement.view import ClusterView
from router.timers import LoopTimers
from tests.doubles.fake_flight_records import FakeFlightRecords, FakeFlightStore
from tests.doubles.faulty_transfer_backend import Faults
from tests.support.simulated_cluster import Answer, SimulatedCluster, SimulatedLimits, _Client

_PROGRESS_S = 200.0


class SimulatedRouter:
    """One incarnation of a router, with the parts that its process has."""

    def __init__(self, cluster: RoutedCluster, name: str, run: int) -> None:
        self.name = name
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_gone = False
        incarnation, timers, spec = f"{name}.{run}", LoopTimers(), cluster.limits.spec
        self.view = ClusterView(timers.monotonic)
        self.links = NodeLinks(
            lambda address: _Client(cluster, address), name, timers, cluster.rng, router_incarnation=incarnation
        )
        card = ModelCard(spec.name, spec.max_model_len, spec.vocab_size)
        journal = FlightJournal(FakeFlightRecords(cluster.store, "c"), incarnation, timers.monotonic)
        patience = DispatchLimits(capacity_wait_s=20.0, recovery_wait_s=60.0)
        self.dispatcher = Dispatcher(self.view, self.links, None, lambda: card, timers, cluster.rng, patience, journal)

    async def answer(
        self, ask: Callable[[Dispatcher], AsyncGenerator[GenerateEvent, None]]
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Run one call of a client. Raises Unreachable once the process is gone."""
        if self.is_gone:
            raise Unreachable(f"{self.name} is gone")
        async with aclosing(ask(self.dispatcher)) as events:
            while True:
                following: asyncio.Future[Any] = asyncio.ensure_future(anext(events))
                try:
                    await asyncio.wait({following, self._gone}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not following.done() or self.is_gone:
                        following.cancel()
                        await asyncio.gather(following, return_exceptions=True)
                if self.is_gone:
                    raise Unreachable(f"{self.name} is gone: connection reset")
                try:
                    event = following.result()
                except StopAsyncIteration:
                    return
                yield event

    async def stop(self) -> None:
        """End as after SIGTERM once the time to drain is over."""
        self.dispatcher.drain()
        self.dispatcher.leave_all_to_other_routers()
        # Clients receive the end of their streams before the connections are closed.
        await self.dispatcher.idle()
        await self.kill()

    async def kill(self) -> None:
        """End as SIGKILL does: every connection breaks, and nothing more is sent."""
        self.is_gone = True
        await self.links.close()
        self._gone.set_result(None)


class RoutedCluster(SimulatedCluster):
    """A simulated cluster with routers that can die. The router of the base class serves nobody."""

    def __init__(self, limits: SimulatedLimits, rng: Random, faults: Callable[[], Faults]) -> None:
        self.store = FakeFlightStore()
        self.routers: dict[str, SimulatedRouter] = {}
        self._router_runs: dict[str, int] = {}
        super().__init__(limits, rng, faults)

    def start_router(self, name: str) -> SimulatedRouter:
        """Start a new incarnation of the router."""
        self._router_runs[name] = run = self._router_runs.get(name, 0) + 1
        router = self.routers[name] = SimulatedRouter(self, name, run)
        self._tell(router)
        return router

    def _register(self) -> None:
        super()._register()
        for router in self.routers.values():
            self._tell(router)

    def _tell(self, router: SimulatedRouter) -> None:
        if not router.is_gone:
            records = self._records()
            router.view.registered(records)
            router.links.update(records)

    async def close(self) -> None:
        for router in self.routers.values():
            await router.links.close()
        await super().close()

    async def ask(self, request: GenerateRequest, leaves: Callable[[], bool] = lambda: False) -> Answer:
        """Run one request to its end, as the Python client does.

        After each event `leaves` decides whether the client leaves the stream open and continues at another router, as
        a client does whose connection is dead without either end knowing.
        """
        loop, names, answer = asyncio.get_running_loop(), sorted(self.routers), Answer()
        request = with_id_and_seed(request, self.rng)
        continuation = Continuation(EndpointRotation(names, self.rng), self.rng, loop.time(), _PROGRESS_S)
        left: list[AsyncGenerator[GenerateEvent, None]] = []
        while answer.finished is None:
            call = continuation.next_call()
            router = self.routers[names[call.endpoint]]
            events = router.answer(partial(_call, call, request))
            try:
                async for event in events:
                    fresh = continuation.receive(event, loop.time())
                    if fresh is not None:
                        answer.note(fresh)
                    if answer.finished is not None:
                        break
                    if leaves():
                        left.append(events)
                        raise Unreachable("the connection is dead")
            except BatonError as error:
                try:
                    wait_s = continuation.call_failed(error, loop.time())
                except BatonError as final:
                    answer.error = final
                    break
                await asyncio.sleep(wait_s)
            if events not in left:
                await events.aclose()
        for events in left:
            await events.aclose()
        return answer


def _call(call: Call, request: GenerateRequest, dispatcher: Dispatcher) -> AsyncGenerator[GenerateEvent, None]:
    if call.kind is CallKind.GENERATE:
        return dispatcher.generate(replace(request, call=call.number))
    return dispatcher.resume(request.request_id, call.positions, call=call.number)
