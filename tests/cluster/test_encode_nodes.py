"""Encode nodes make the rows of images; without them prefill nodes do, with the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.engine.runner import ModelRunner
from baton.errors import InvalidRequest
from baton.messages.generation import GenerateRequest
from baton.messages.node import Role
from baton.runner.encoder_alone import load_encoder_alone
from baton.runner.loading import load_runner
from baton.runner.spec import TorchSpec
from baton.wire.clients.node_client import NodeClient
from tests.support.image_models import add_image_tokens, random_image, write_image_model
from tests.support.mini_cluster import MiniCluster, mini_cluster

pytestmark = pytest.mark.one_transport


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, an encode node that is there is not given up."""
    monkeypatch.setattr("baton.node.encoding.UNKNOWN_S", 60.0)


IMAGES = [random_image(seed, 90, 60) for seed in range(4)]
IN_TURN = {"placement": "round-robin", "require_disaggregation": "on"}


@asynccontextmanager
async def with_encoders(directory: Path, encode: int, prefill: int = 2) -> AsyncIterator[MiniCluster]:
    """A cluster with so many encode nodes, whose prompts go to prefill nodes in turn."""
    if not (directory / "config.json").exists():
        write_image_model(directory, "idefics3")
        add_image_tokens(directory)

    def make_runner(node_id: str) -> ModelRunner:
        spec = TorchSpec(directory, dtype="float32", block_size=16, num_blocks=160)
        return load_encoder_alone(spec) if node_id.startswith("encode") else load_runner(spec)

    async with mini_cluster(
        make_runner, directory, prefill=prefill, encode=encode, router_settings=IN_TURN, num_encoder_rows=200
    ) as cluster:
        yield cluster


async def tokens_of(cluster: MiniCluster, text: str, *images: bytes) -> Sequence[int]:
    prompt = text + "<image>" * len(images)
    request = GenerateRequest(prompt, images=list(images), temperature=0.0, max_tokens=8, ignore_eos=True)
    return tuple((await cluster.generate(request)).token_ids)


def made_by(cluster: MiniCluster, role: str) -> int:
    """How many images the encoders of the nodes of a role have made rows of."""
    nodes = [node for name, node in cluster.nodes.items() if name.startswith(role)]
    return sum(node.node.scheduler.encoder_cache.num_encoded for node in nodes)


async def ask_all(cluster: MiniCluster) -> list[Sequence[int]]:
    """The tokens behind each image, behind all of them, and behind each once more with another text before it."""
    found = await asyncio.gather(*(tokens_of(cluster, f"{number} ", each) for number, each in enumerate(IMAGES)))
    found += [await tokens_of(cluster, "all ", *IMAGES)]
    return found + [await tokens_of(cluster, f"again {number} ", each) for number, each in enumerate(IMAGES)]


async def test_rows_of_encode_nodes_give_the_tokens_of_a_cluster_without_them(tmp_path: Path) -> None:
    async with with_encoders(tmp_path, encode=0) as cluster:
        expected = await ask_all(cluster)
    async with with_encoders(tmp_path, encode=2) as cluster:
        assert await ask_all(cluster) == expected
        # Each image is made by one encode node, once.
        assert (made_by(cluster, "encode"), made_by(cluster, "prefill")) == (len(IMAGES), 0)


async def test_prefill_nodes_encode_where_encode_nodes_are_gone(tmp_path: Path) -> None:
    async with with_encoders(tmp_path, encode=1) as cluster:
        first = await tokens_of(cluster, "a ", IMAGES[0])
        assert (made_by(cluster, "encode"), made_by(cluster, "prefill")) == (1, 0)
        await cluster.nodes["encode-0"].end()
        # The second one needs the image there too: neither the rows nor their encode node are there any more.
        assert await tokens_of(cluster, "a ", IMAGES[0]) == first
        await tokens_of(cluster, "b ", IMAGES[1])
        assert made_by(cluster, "prefill") >= 1
        await cluster.wait_until_idle("prefill-0", "prefill-1")


async def test_an_encode_node_runs_no_leg_and_stays_what_it_is(tmp_path: Path) -> None:
    async with with_encoders(tmp_path, encode=1, prefill=1) as cluster:
        client = NodeClient(cluster.nodes["encode-0"].description.address)
        try:
            with pytest.raises(InvalidRequest, match="it stays one"):
                await client.set_role(Role.DECODE)
        finally:
            await client.close()
        # What can't be decoded is refused by the prefill node, for the same reason.
        with pytest.raises(InvalidRequest, match="images"):
            await tokens_of(cluster, "x ", IMAGES[0][:-600])
        assert await tokens_of(cluster, "y ", IMAGES[1])
        assert made_by(cluster, "encode") == 1
