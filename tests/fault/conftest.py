"""The cluster that the tests of a file share: two processes of each role with a simulated model, slow enough to hit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from baton.processes.fork_server import give_fork_server
from tests.support.forked_commands import fork_server
from tests.support.mini_cluster import simulated_model_dir
from tests.support.process_cluster import ClusterSession, ProcessCluster, process_cluster
from tests.support.slow_model import FLAGS, MAX_MODEL_LEN, STEP_TIMES, VOCAB_SIZE


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_model_dir(tmp_path_factory.mktemp("simulated"), VOCAB_SIZE, MAX_MODEL_LEN)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[ProcessCluster]:
    run_dir = tmp_path_factory.mktemp("cluster") / "run"
    sizes = ("--prefill", "2", "--decode", "2", "--routers", "2")
    with process_cluster(run_dir, model, *FLAGS, *sizes, environment=STEP_TIMES) as running:
        yield running


@pytest.fixture
def forked_ranks() -> Iterator[None]:
    """Meanwhile the processes of ranks and stages that this process starts are forked."""
    give_fork_server(fork_server())
    yield
    give_fork_server(None)


@pytest.fixture(scope="module")
def failpoints_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a module requests faults of its clusters (see baton/failpoints.py)."""
    return tmp_path_factory.mktemp("failpoints")


@pytest.fixture
async def session(cluster: ProcessCluster) -> AsyncIterator[ClusterSession]:
    """The shared cluster; all processes run and are idle before a test and after it."""
    async with cluster.session() as opened:
        await opened.wait_until_whole()
        await opened.wait_until_idle()
        yield opened
        await opened.wait_until_whole()
        await opened.wait_until_idle()
