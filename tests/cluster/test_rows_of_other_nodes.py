"""An image that one prefill node has encoded is not encoded by another one, which fetches the rows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.messages.generation import GenerateRequest
from baton.runner.loading import load_runner
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.support.image_models import add_image_tokens, random_image, write_image_model
from tests.support.mini_cluster import MiniCluster, mini_cluster

pytestmark = pytest.mark.one_transport

IMAGE = random_image(7, 90, 60)
IN_TURN = {"placement": "round-robin", "require_disaggregation": "on"}
PREFILLS = ("prefill-0", "prefill-1")


@asynccontextmanager
async def two_prefill_nodes(directory: Path) -> AsyncIterator[tuple[MiniCluster, Mapping[str, TorchModelRunner]]]:
    """A cluster whose prompts go to two prefill nodes in turn, and the runners of its nodes."""
    write_image_model(directory, "idefics3")
    add_image_tokens(directory)
    runners: dict[str, TorchModelRunner] = {}

    def make_runner(node_id: str) -> TorchModelRunner:
        runners[node_id] = load_runner(TorchSpec(directory, dtype="float32", block_size=16, num_blocks=160))
        return runners[node_id]

    async with mini_cluster(make_runner, directory, prefill=2, router_settings=IN_TURN) as cluster:
        yield cluster, runners


def counts(cluster: MiniCluster) -> list[tuple[int, int]]:
    """How many images each prefill node has encoded, and of how many it has fetched the rows."""
    caches = [cluster.nodes[name].node.scheduler.encoder_cache for name in PREFILLS]
    return sorted((cache.num_encoded, cache.num_fetched) for cache in caches)


async def test_rows_are_fetched_from_the_node_that_made_them(tmp_path: Path) -> None:
    async with two_prefill_nodes(tmp_path) as (cluster, _):

        async def tokens_of(text: str, image: bytes = IMAGE) -> list[int]:
            request = GenerateRequest(f"{text}<image>", images=[image], temperature=0.0, max_tokens=8, ignore_eos=True)
            return list((await cluster.generate(request)).token_ids)

        async def until(expected: list[tuple[int, int]]) -> list[list[int]]:
            """Ask with other texts before the image, until the nodes have these counts."""
            found: list[list[int]] = []
            while counts(cluster) != expected:
                found.append(await tokens_of(f"{expected} {len(found)} "))
            return found

        made = await until([(0, 0), (1, 0)])
        await until([(0, 1), (1, 0)])
        fetcher = next(name for name in PREFILLS if cluster.nodes[name].node.scheduler.encoder_cache.num_fetched)
        (holder,) = set(PREFILLS) - {fetcher}
        await cluster.nodes[holder].end()
        # With the rows that it fetched the other node generates what the one did that made them.
        assert [await tokens_of(f"{[(0, 0), (1, 0)]} {number} ") for number in range(len(made))] == made
        assert counts(cluster) == [(0, 1), (1, 0)]


async def test_a_node_that_has_lost_its_rows_is_no_obstacle(tmp_path: Path) -> None:
    async with two_prefill_nodes(tmp_path) as (cluster, runners):
        found = []
        for number in range(2):
            request = GenerateRequest(
                f"{number} <image>", images=[IMAGE], temperature=0.0, max_tokens=4, ignore_eos=True
            )
            found.append((await cluster.generate(request)).end.path.prefill_node)
            # No step names the rows any more, and the node still says that it has them.
            for runner in runners.values():
                runner.encoder.release(None)
        assert set(found) == set(PREFILLS)
        assert counts(cluster) == [(1, 0), (1, 0)]
