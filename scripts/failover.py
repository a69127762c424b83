"""Measures how long large failures block a router's event loop, and fails if it is too long.

There are two failures, each repeated several times. Dispatcher, links, placement and flight records are the router's
own; the nodes are in this process and compute nothing.

cut       all links of the router break at once while many streams are open. The nodes are alive, so every stream must
          continue: none ends, and no new attempt starts.
takeover  another router has died, and all of its clients resume their streams at this one at once. Every flight is read
          from its record and adopted from its nodes.

A turn of the loop is measured as in a running router (see baton.observe.loop_probe): in wall-clock time, and in
processor time of its thread. The limits are for wall-clock time, so run this on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from baton.bench.micro.relay_nodes import MAX_MODEL_LEN, bench_description
from baton.bench.results.host import processor
from baton.bench.results.spread import Spread
from baton.messages.generation import Chunk, GenerateEvent, GenerateRequest, ModelCard
from baton.messages.ids import AttemptKey
from baton.messages.node import Adopt, Leg, Outcome, RequestDelta, Role, StageTimings, Submit
from baton.messages.sampling import SamplingParams
from baton.node.reports.reports import node_record
from baton.observe.loop_probe import ProbedEventLoop
from baton.observe.metrics import Figure
from router.admission.request import ValidRequest
from router.dispatcher import Dispatcher
from router.flight.flight_record import FlightJournal
from router.node_links import NodeLinks
from router.operations.idle_collector import set_thresholds
from router.placement.placement import Placement
from router.placement.placer import Placer
from router.placement.reasons import LEAST_LOADED
from router.placement.view import ClusterView
from router.timers import LoopTimers
from tests.doubles.fake_flight_records import FakeFlightRecords, FakeFlightStore
from tests.doubles.fake_node import FakeNode, FakeNodes

MODEL = "simulated"
BEFORE, AFTER = 3, 5
"""Tokens of a stream before its links are cut, and after that."""
MAX_HELD_CUT_S = 0.2
MAX_HELD_TAKEOVER_S = 0.05
MAX_TAKEOVER_S = 1.0
_GIVE_UP_S = 120.0
"""A round that takes longer is taken to hang."""


class _Node:
    """A node that computes nothing: it hands off prompts at once, and reports the first or the missing tokens."""

    def __init__(self, fakes: FakeNodes, index: int, count: int) -> None:
        description = bench_description(index, count, MODEL, MAX_MODEL_LEN)
        self.fake = fakes.add(FakeNode(replace(description, address=f"{description.node_id}:1")))
        self._task = asyncio.create_task(self._answer())

    async def stop(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _answer(self) -> None:
        while True:
            match await self.fake.inbox.get():
                case Submit(attempt=key, leg=Leg.PREFILL):
                    self.fake.report(RequestDelta(key, 0, (0,), outcome=Outcome.HANDED_OFF))
                case Submit(attempt=key):
                    self.fake.report(RequestDelta(key, 0, tuple(range(BEFORE)), timings=StageTimings()))
                case Adopt(attempt=key, num_tokens=known):
                    self.fake.report(RequestDelta(key, timings=StageTimings()))
                    if self.fake.description.role is Role.DECODE:
                        first = known[0] if known else 0
                        self.fake.report(RequestDelta(key, first, tuple(range(first, BEFORE + AFTER))))
            # A real node's reports arrive over a socket, in different turns of the loop.
            await asyncio.sleep(0)


class _Router:
    """A router without its ports and without Redis."""

    def __init__(self, name: str, store: FakeFlightStore) -> None:
        self._timers, self._view, self.fakes = LoopTimers(), ClusterView(), FakeNodes()
        self.links = NodeLinks(self.fakes.connect, name, self._timers, Random(1))
        card = ModelCard(MODEL, MAX_MODEL_LEN, MAX_MODEL_LEN)
        self.journal = FlightJournal(FakeFlightRecords(store, "c"), name, time.time)
        self.dispatcher = Dispatcher(
            self._view, self.links, None, lambda: card, self._timers, Random(1), None, self.journal, Placer()
        )

    async def attach(self, nodes: Sequence[_Node]) -> None:
        """Waits until all nodes are attached."""
        records = [node_record(node.fake.description, 1.0, lease_s=60.0) for node in nodes]
        self._view.registered(records)
        self.links.update(records)
        while len(self._view.descriptions()) < len(nodes):
            self.dispatcher.requests.changed.clear()
            await self.dispatcher.requests.changed.wait()


@dataclass(frozen=True, slots=True)
class Round:
    """What was measured in one failure."""

    took_s: float
    """Seconds until the last client had the following tokens."""
    held_s: float
    held_cpu_s: float
    """The longest turn of the loop meanwhile, in wall-clock and in processor time."""
    num_ended: int
    """Streams that ended although they could have continued."""
    num_anew: int
    """New attempts that were started."""


class _Client:
    """Reads a stream in its own task."""

    def __init__(self, stream: AsyncGenerator[GenerateEvent, None], wanted: int) -> None:
        self.tokens: list[int] = []
        self.has_begun, self.has_all = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._read(stream, wanted))

    async def _read(self, stream: AsyncGenerator[GenerateEvent, None], wanted: int) -> None:
        try:
            async for event in stream:
                if isinstance(event, Chunk):
                    self.tokens += event.token_ids
                if len(self.tokens) >= BEFORE:
                    self.has_begun.set()
                if len(self.tokens) >= wanted:
                    self.has_all.set()
        finally:
            # Waiters must not hang if the stream ends early; missing tokens are counted later.
            self.has_begun.set()
            self.has_all.set()


def _longest_turn() -> tuple[float, float]:
    """The longest turn of this loop in wall-clock and in processor time, including turns before the failure."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ProbedEventLoop)
    seen = {figure.name: figure.value for figure in loop.probe.figures() if isinstance(figure, Figure)}
    return seen["event_loop_held_seconds_max"], seen["event_loop_held_cpu_seconds_max"]


async def _end(clients: Sequence[_Client], router: _Router, nodes: Sequence[_Node]) -> None:
    for client in clients:
        client.task.cancel()
    await asyncio.gather(*(client.task for client in clients), return_exceptions=True)
    await router.links.close()
    for node in nodes:
        await node.stop()


async def cut(num_pairs: int, num_streams: int) -> Round:
    """Measures a failure in which all links of a router break at once."""
    router = _Router("router-0", FakeFlightStore())
    nodes = [_Node(router.fakes, index, 2 * num_pairs) for index in range(2 * num_pairs)]
    await router.attach(nodes)
    clients = []
    for number in range(num_streams):
        request = GenerateRequest((1, 2, 3), request_id=f"r{number}", max_tokens=100)
        clients.append(_Client(router.dispatcher.generate(request, None), BEFORE + AFTER))
        await clients[-1].has_begun.wait()
    attempts = router.dispatcher.requests.counters.attempts.total()
    began = time.perf_counter()
    for node in nodes:
        node.fake.cut()
    for client in clients:
        await client.has_all.wait()
    took, (held, held_cpu) = time.perf_counter() - began, _longest_turn()
    num_ended = sum(client.task.done() or client.tokens != [*range(BEFORE + AFTER)] for client in clients)
    seen = Round(took, held, held_cpu, num_ended, router.dispatcher.requests.counters.attempts.total() - attempts)
    await _end(clients, router, nodes)
    return seen


async def takeover(num_flights: int, num_prompt_tokens: int) -> Round:
    """Measures a failure in which the clients of a dead router resume at another one."""
    store = FakeFlightStore()
    router = _Router("router-1", store)
    nodes = [_Node(router.fakes, index, 2) for index in range(2)]
    await router.attach(nodes)
    dead, prompt = FlightJournal(FakeFlightRecords(store, "c"), "router-0", time.time), [*range(num_prompt_tokens)]
    pair = Placement(nodes[0].fake.description, nodes[1].fake.description, LEAST_LOADED)
    for number in range(num_flights):
        request = ValidRequest(prompt, SamplingParams(max_tokens=100, seed=1), request_id=f"r{number}", model=MODEL)
        dead.write(request, AttemptKey(request.request_id, 1, number + 1), pair)
        await asyncio.sleep(0)
    began = time.perf_counter()
    clients = []
    for number in range(num_flights):
        clients.append(_Client(router.dispatcher.resume(f"r{number}", [BEFORE], call=2), AFTER))
        # Calls arrive over sockets, and one turn of the loop reads a limited number of them.
        if number % 64 == 63:
            await asyncio.sleep(0)
    for client in clients:
        await client.has_all.wait()
    took, (held, held_cpu) = time.perf_counter() - began, _longest_turn()
    num_ended = sum(client.task.done() or client.tokens != [*range(BEFORE, BEFORE + AFTER)] for client in clients)
    counters = router.dispatcher.requests.counters
    seen = Round(took, held, held_cpu, num_ended, counters.attempts.total() + num_flights - counters.adopted)
    await _end(clients, router, nodes)
    return seen


def _line(what: str, rounds: Sequence[Round]) -> str:
    took, held, cpu = (
        Spread.of([getattr(seen, name) for seen in rounds], 1e3) for name in ("took_s", "held_s", "held_cpu_s")
    )
    return (
        f"{what}: all streams continue after {took.median:.0f} ms [{took.p10:.0f}, {took.p90:.0f}]; longest loop turn "
        f"{held.median:.0f} ms [{held.p10:.0f}, {held.p90:.0f}], processor time {cpu.median:.0f} ms; "
        f"{sum(seen.num_ended for seen in rounds)} ended, {sum(seen.num_anew for seen in rounds)} new attempts"
    )


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failure, with the limits for the longest turn of the loop and for the total time, in seconds."""

    name: str
    measure: Callable[[], Coroutine[None, None, Round]]
    max_held_s: float
    max_took_s: float = math.inf

    def rounds(self, count: int) -> list[Round]:
        """Repeats the failure, each time on a new event loop of the router's kind. Raises TimeoutError if one hangs."""
        rounds = []
        for _ in range(count):
            gc.collect()
            with asyncio.Runner(loop_factory=ProbedEventLoop) as runner:
                rounds.append(runner.run(asyncio.wait_for(self.measure(), _GIVE_UP_S)))
        return rounds

    def is_passed(self, seen: Round) -> bool:
        """Whether a round kept all limits."""
        in_time = seen.held_s <= self.max_held_s and seen.took_s <= self.max_took_s
        return in_time and not seen.num_ended and not seen.num_anew

    @property
    def limits(self) -> str:
        held = f"held {self.max_held_s * 1e3:.0f} ms"
        return held if math.isinf(self.max_took_s) else f"{held}, {self.max_took_s * 1e3:.0f} ms in all"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/failover", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--pairs", type=int, default=300, help="number of prefill nodes, and of decode nodes (default: 300)"
    )
    parser.add_argument("--streams", type=int, default=900, help="open streams in the failure cut (default: 900)")
    parser.add_argument("--flights", type=int, default=1000, help="flights of the dead router (default: 1000)")
    parser.add_argument("--prompt-tokens", type=int, default=32_768, help="tokens of their prompts (default: 32768)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each failure (default: 5)")
    arguments = parser.parse_args()
    set_thresholds()
    print(processor())
    cuts, takeovers = (arguments.pairs, arguments.streams), (arguments.flights, arguments.prompt_tokens)
    failures = [
        _Failure("cut: {0}+{0} nodes, {1} streams".format(*cuts), partial(cut, *cuts), MAX_HELD_CUT_S),
        _Failure(
            "takeover: {} flights of {} tokens".format(*takeovers),
            partial(takeover, *takeovers),
            MAX_HELD_TAKEOVER_S,
            MAX_TAKEOVER_S,
        ),
    ]
    passed = True
    for failure in failures:
        rounds = failure.rounds(arguments.rounds)
        is_passed = all(map(failure.is_passed, rounds))
        passed &= is_passed
        verdict = "PASS" if is_passed else "FAIL"
        print(f"{verdict}  {_line(failure.name, rounds)} (every round: at most {failure.limits})")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
