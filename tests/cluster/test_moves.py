"""Streams leave a node that is to be empty, and one moves where an operator wants it: no token changes or is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.client import OperatorClient
from baton.errors import BatonError, NoCapacity, NodeNotFound, RequestNotFound
from baton.messages.generation import GenerateRequest
from baton.messages.sampling import SamplingParams
from baton.runner import SimulatedSpec, StepTime
from baton.runner.simulated import SimulatedRunner
from tests.support.caller import Answer, TokenCount
from tests.support.mini_cluster import MiniCluster, mini_cluster
from tests.support.simulated_oracle import expected_tokens

pytestmark = [pytest.mark.usefixtures("forked_commands")]

SPEC = SimulatedSpec(
    num_blocks=192, vocab_size=256, max_model_len=1024, step_time=StepTime(per_step=0.004), sleep=time.sleep
)
PROMPT = list(range(40))
NEW_TOKENS = 300


@dataclass
class Stream:
    """A stream that has begun."""

    prompt: list[int]
    max_tokens: int
    answer: asyncio.Task[Answer]

    async def assert_right(self, *, num_moves: int | None = None) -> Answer:
        """Check that it ends with the tokens of an undisturbed run, after so many moves and no failed attempt."""
        answer, params = await self.answer, SamplingParams(temperature=0.0, max_tokens=self.max_tokens)
        assert answer.token_ids == expected_tokens(self.prompt, params, SPEC)
        assert answer.indices == list(range(self.max_tokens))
        if answer.logprobs:
            assert [each.token_id for each in answer.logprobs] == answer.token_ids
        assert num_moves is None or answer.end.path.attempts == 1 + num_moves
        return answer


class Streams:
    """Streams of one cluster."""

    def __init__(self, cluster: MiniCluster) -> None:
        self._cluster = cluster
        self.operator = OperatorClient(cluster.router.operator)

    async def begin(self, name: str, max_tokens: int = NEW_TOKENS, n: int = 1, logprobs: int | None = None) -> Stream:
        """Begin a stream, and return once it decodes."""
        prompt, count = [*PROMPT, *name.encode()], TokenCount()
        request = GenerateRequest(prompt, name, temperature=0.0, max_tokens=max_tokens, n=n, logprobs=logprobs)
        answer = asyncio.create_task(self._cluster.generate(request, on_event=count))
        await count.wait_for_tokens(3)
        return Stream(prompt, max_tokens, answer)

    async def node_of(self, name: str) -> str:
        """The node that decodes a stream."""
        rows = await asyncio.to_thread(self.operator.requests, request_id=name)
        return rows[0].decode_node

    async def num_prompts_computed(self) -> int:
        """How many prompts nodes have begun to compute."""
        traces = [await self._cluster.trace(name) for name in self._cluster.nodes]
        return len({event.attempt for trace in traces for event in trace if event.name == "chunk_computed"})


@asynccontextmanager
async def streaming(directory: Path, **settings: object) -> AsyncIterator[tuple[MiniCluster, Streams]]:
    async with mini_cluster(
        lambda _: SimulatedRunner(SPEC),
        directory,
        decode=2,
        token_ids_only=True,
        router_settings={"grpc_server": "own", **settings},
    ) as cluster:
        streams = Streams(cluster)
        try:
            yield cluster, streams
        finally:
            streams.operator.close()


@pytest.mark.one_transport
async def test_an_operator_moves_a_stream_or_hears_why_it_stays(tmp_path: Path) -> None:
    async with streaming(tmp_path) as (cluster, streams):
        one, two = await streams.begin("one", 900, logprobs=1), await streams.begin("two", 600, n=2)
        assert "several sequences stays" in await cluster.baton("move", "two", exit_code=2)
        source = await streams.node_of("one")
        other = next(name for name in ("decode-0", "decode-1") if name != source)
        assert await cluster.baton("move", "one") == f"one: {source} -> {other}\n"
        assert await streams.node_of("one") == other
        assert f'"to": "{source}"' in await cluster.baton("move", "one", "--to", source, "-o", "json")
        wrong: list[tuple[str, str, type[BatonError], str]] = [
            ("one", source, NoCapacity, "no other decode node"),
            ("one", "prefill-0", NoCapacity, "no other decode node"),
            ("one", "decode-7", NodeNotFound, "no node is called decode-7"),
            ("nobody", "", RequestNotFound, "no live request 'nobody'"),
        ]
        for request_id, to, error, why in wrong:
            with pytest.raises(error, match=why):
                await asyncio.to_thread(streams.operator.move, request_id, to)
        answer = await one.assert_right(num_moves=2)
        assert len(answer.logprobs) == 900
        assert answer.end.path.prefill_node in ("prefill-0", ""), "the other one has not computed the prompt"
        await two.answer
        assert "moved there while it was decoded" in await cluster.baton("explain", "one")


async def test_streams_leave_a_node_that_is_to_be_empty_and_no_prompt_is_computed_again(tmp_path: Path) -> None:
    async with streaming(tmp_path) as (cluster, streams):
        begun = [await streams.begin(f"r{number}") for number in range(4)]
        computed = await streams.num_prompts_computed()
        drained = await streams.node_of("r0")
        await asyncio.to_thread(lambda: list(streams.operator.drain(drained)))
        assert not cluster.nodes[drained].num_blocks_in_use
        first = [await stream.assert_right() for stream in begun]
        assert drained not in {answer.end.path.decode_node for answer in first}
        assert await streams.num_prompts_computed() == computed, "of answers, none"
        await asyncio.to_thread(streams.operator.uncordon, [drained])

        # A node that changes its role, and one that is told to stop.
        again = [await streams.begin(f"s{number}") for number in range(2)]
        other = await streams.node_of("s0")
        await asyncio.to_thread(streams.operator.set_role, other, "prefill")
        for stream in again:
            assert (await stream.assert_right()).end.path.decode_node != other


@pytest.mark.one_transport
async def test_streams_stay_where_they_are_if_the_setting_says_so(tmp_path: Path) -> None:
    async with streaming(tmp_path, move_streams="off") as (_, streams):
        stream = await streams.begin("r", 60)
        source = await streams.node_of("r")
        await asyncio.to_thread(streams.operator.cordon, [source])
        assert (await stream.assert_right(num_moves=0)).end.path.decode_node == source
