"""kill -9 of random processes in a cluster under load, drawn from a seed, and what the clients saw of it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from baton.cli.cluster.state import ProcessState
from baton.client import AsyncGenerationClient
from baton.messages.generation import Accepted, Chunk, Finished, GenerateRequest, SequenceFinished
from baton.messages.sampling import TokenLogprobs
from tests.support.process_cluster import ProcessCluster

ROLES = ("prefill", "decode", "router", "redis")
_PAUSE_S = 0.05


@dataclass(slots=True)
class ObservedSequence:
    """Everything that arrived of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: str = ""


@dataclass(slots=True)
class ObservedAnswer:
    """One answer: its sequences, and the longest time that its client waited for the next event."""

    streams: dict[int, ObservedSequence] = field(default_factory=dict)
    began: float = 0.0
    first_chunk: float = 0.0
    ended: float = 0.0
    longest_stall_s: float = 0.0
    attempts: int = 0

    def check(self, undisturbed: ObservedAnswer) -> str:
        """Return how it differs from the answer of an undisturbed run; empty: not at all."""
        for index, stream in self.streams.items():
            if stream.indices != list(range(len(stream.token_ids))):
                return f"sequence {index}: indices {stream.indices}"
        if self.streams != undisturbed.streams:
            return f"{self.streams} instead of {undisturbed.streams}"
        return ""


async def observe_answer(client: AsyncGenerationClient, request: GenerateRequest) -> ObservedAnswer:
    """Run one request to its end. Raises BatonError."""
    loop, seen = asyncio.get_running_loop(), ObservedAnswer()
    seen.began = last = loop.time()
    async for event in client.generate(request):
        now = loop.time()
        seen.longest_stall_s, last = max(seen.longest_stall_s, now - last), now
        match event:
            case Chunk():
                seen.first_chunk = seen.first_chunk or now
                stream = seen.streams.setdefault(event.sequence_index, ObservedSequence())
                stream.indices += range(event.first_index, event.first_index + len(event.token_ids))
                stream.token_ids += event.token_ids
                stream.text += event.text
                stream.logprobs += event.logprobs
            case SequenceFinished():
                seen.streams[event.sequence_index].end = event.finish_reason
            case Finished():
                seen.streams[0].end = event.finish_reason
                seen.attempts = event.path.attempts
            case Accepted():
                pass
    seen.ended = loop.time()
    return seen


def requests(rng: Random, count: int, vocab_size: int, longest_prompt: int) -> list[GenerateRequest]:
    """Return requests of each kind whose tokens a failover could change: sampled, penalised, stop strings, n > 1."""
    prefix = [rng.randrange(vocab_size) for _ in range(longest_prompt // 2)]
    made = []
    for number in range(count):
        own = [rng.randrange(vocab_size) for _ in range(rng.randint(1, longest_prompt // 2))]
        kind = number % 6
        plain = GenerateRequest(
            prefix + own if rng.random() < 0.5 else own,
            temperature=0.0 if kind == 0 else 1.0,
            seed=rng.getrandbits(50),
            max_tokens=rng.randint(20, 120),
            ignore_eos=True,
        )
        variants = (
            plain,
            plain,
            replace(plain, presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.2, min_tokens=10),
            replace(plain, stop=("e", "return")[:1] if rng.random() < 0.3 else ("\n\n", "return")),
            replace(plain, logprobs=2, top_p=0.9, top_k=40),
            replace(plain, n=3, max_tokens=40),
        )
        made.append(variants[kind])
    return made


class Killer:
    """Kills random processes, of each role in turn, but never the last router, prefill or decode node that serves."""

    def __init__(self, cluster: ProcessCluster, rng: Random, kills: int, pause_s: tuple[float, float]) -> None:
        self._cluster = cluster
        self._rng = rng
        self._kills = kills
        self._pause_s = pause_s
        self.killed: Counter[str] = Counter()
        self.times: list[float] = []
        """The time of each kill, on the clock of the loop."""

    async def run(self, is_enough: Callable[[], bool]) -> None:
        """Kill as often as was asked for, and then on until it `is_enough`."""
        roles: list[str] = []
        while True:
            await asyncio.sleep(self._rng.uniform(*self._pause_s))
            if self.killed.total() >= self._kills and is_enough():
                return
            roles = roles or self._rng.sample(ROLES, len(ROLES))
            role = roles.pop()
            serving = self._serving(role)
            while len(serving) < (1 if role == "redis" else 2):
                await asyncio.sleep(_PAUSE_S)
                serving = self._serving(role)
            victim = self._rng.choice(serving)
            os.kill(victim.pid, signal.SIGKILL)
            self.killed[role] += 1
            self.times.append(asyncio.get_running_loop().time())

    def _serving(self, role: str) -> list[ProcessState]:
        return [p for p in self._cluster.state.processes if p.role == role and p.status == "Ready" and p.pid]


@dataclass(slots=True)
class DrillResult:
    """The result of a whole drill."""

    answers: list[ObservedAnswer] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def retried(self) -> int:
        """The number of answers that took more than one attempt."""
        return sum(seen.attempts > 1 for seen in self.answers)

    def moved(self, kills: Sequence[float]) -> int:
        """Return how many answers had begun to arrive when a process was killed, and took more than one attempt."""
        return sum(
            seen.attempts > 1 and any(seen.first_chunk <= at <= seen.ended for at in kills) for seen in self.answers
        )

    def stalls_s(self, kills: Sequence[float]) -> list[float]:
        """Return the longest stall of each answer that was streaming during a kill, sorted."""
        return sorted(
            seen.longest_stall_s for seen in self.answers if any(seen.began <= at <= seen.ended for at in kills)
        )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values; 0 if there are none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class Load:
    """Clients that send one request after the other until `stop`, each with its own connections."""

    def __init__(
        self, addresses: Sequence[str], asked: Sequence[GenerateRequest], undisturbed: Sequence[ObservedAnswer]
    ) -> None:
        self._addresses = addresses
        self._asked = asked
        self._undisturbed = undisturbed
        self._over = False
        self.result = DrillResult()

    def stop(self) -> None:
        """Send no new requests."""
        self._over = True

    async def client(self, rng: Random) -> None:
        async with AsyncGenerationClient(*self._addresses, rng=rng) as client:
            while not self._over:
                place = rng.randrange(len(self._asked))
                try:
                    seen = await observe_answer(client, self._asked[place])
                except Exception as error:
                    self.result.lost.append(f"request {place}: {type(error).__name__}: {error}")
                    continue
                self._note(place, seen)

    def _note(self, place: int, seen: ObservedAnswer) -> None:
        self.result.answers.append(seen)
        if problem := seen.check(self._undisturbed[place]):
            self.result.wrong.append(f"request {place}: {problem}"[:2000])
