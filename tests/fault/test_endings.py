"""How a cluster ends, and what it reports when its processes keep failing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from random import Random

import pytest

from baton.errors import BatonError
from baton.messages.generation import GenerateRequest
from baton.runner.model.random_model import write_random_model
from tests.support.mini_cluster import random_prompt
from tests.support.process_cluster import ProcessCluster, process_cluster, wait_until_ended
from tests.support.slow_model import FLAGS, STEP_TIMES, assert_undisturbed, slow_request
from tests.support.tiny_models import TINY_MODELS


def pids(cluster: ProcessCluster) -> list[int]:
    state = cluster.state
    return [state.pid, *(process.pid for process in state.processes)]


async def test_down_lets_running_requests_end(tmp_path: Path, model: Path) -> None:
    with process_cluster(tmp_path / "run", model, *FLAGS, environment=STEP_TIMES) as cluster:
        everybody = pids(cluster)
        async with cluster.session() as session:
            request = slow_request("last", chunks=3, max_tokens=12)
            answering = asyncio.create_task(session.generate(request))
            await session.wait_for_event("prefill", "chunk_computed", "last")
            await asyncio.to_thread(wait_until_ended, everybody, lambda: _down(cluster))
            answer = await answering
            assert_undisturbed(answer, request)
            assert answer.end.path.attempts == 1


async def test_no_process_survives_the_supervisor(tmp_path: Path, model: Path) -> None:
    with process_cluster(tmp_path / "run", model, *FLAGS, environment=STEP_TIMES) as cluster:
        async with cluster.session() as session:
            request = slow_request("orphan", chunks=3)
            answering = asyncio.create_task(session.generate(request))
            await session.wait_for_event("prefill", "chunk_computed", "orphan")
            everybody = pids(cluster)
            # A stopped process can't watch its supervisor, but the kernel ends it nevertheless.
            os.kill(cluster.process("decode-0").pid, signal.SIGSTOP)
            await asyncio.to_thread(wait_until_ended, everybody, lambda: os.kill(cluster.state.pid, signal.SIGKILL))
            with pytest.raises(BatonError):
                await answering
        assert cluster.baton("status").returncode != 0


@pytest.mark.timeout(300)  # Nodes with torch start five times.
async def test_a_crash_loop_is_shown(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    write_random_model(directory, TINY_MODELS["llama"], seed=1)
    with process_cluster(tmp_path / "run", directory, "--dtype", "float32", "--kv-cache-memory", "4MiB") as cluster:
        async with cluster.session() as session:
            await session.wait_until_whole()
            prompt = GenerateRequest(random_prompt(Random(1), 50, 256), temperature=0.0, max_tokens=8)
            undisturbed = await session.generate(prompt)
            assert undisturbed.end.path.prefill_node == "prefill-0"
            weights = directory / "model.safetensors"
            weights.rename(weights.with_suffix(".away"))
            cluster.signal("prefill-0", signal.SIGKILL)
            await session.wait_for_status(lambda _: cluster.process("prefill-0").status == "CrashLoop")
            shown = cluster.baton("status")
            assert "CrashLoop" in shown.stdout
            assert "safetensors" in shown.stdout, "and why"
            found = json.loads(cluster.baton("get", "nodes", "-o", "json").stdout)["items"]
            assert {node["name"]: node["status"] for node in found}["prefill-0"] == "CrashLoop"
            alone = await session.generate(prompt)
            assert alone.end.path.prefill_node == ""
            assert alone.token_ids == undisturbed.token_ids
            weights.with_suffix(".away").rename(weights)
            await session.wait_until_whole()
            assert (await session.generate(prompt)).end.path.prefill_node == "prefill-0"


def _down(cluster: ProcessCluster) -> None:
    assert json.loads(cluster.baton("down", "-o", "json").stdout)["was_running"] is True
