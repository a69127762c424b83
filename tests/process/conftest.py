"""A shell for each test, and for each file a running cluster of a tiny model, in which no test changes anything."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.runner.model.random_model import write_random_model
from tests.process.shell import Shell
from tests.support.browser import Browser, NoBrowser, browser
from tests.support.process_cluster import ProcessCluster, process_cluster
from tests.support.tiny_models import TINY_MODELS


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_reaches_children() -> None:
    """Let SIGINT end the processes that tests start, also if the tests themselves were started with SIGINT ignored.

    That is how a shell without job control starts its background commands. Children inherit an ignored signal, but not
    one that has a handler.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell; the test fails if it leaves a process behind."""
    opened = Shell(tmp_path / "home")
    yield opened
    opened.assert_nothing_left()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_random_model(directory, TINY_MODELS["llama"], seed=1)
    # It stands in for a model that was saved the usual way: a directory that names its architecture.
    assert json.loads((directory / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    return directory


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[ProcessCluster]:
    with process_cluster(tmp_path_factory.mktemp("cluster") / "run", model, "--threads", "1") as running:
        yield running


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    try:
        with browser(tmp_path_factory.mktemp("chromium")) as opened:
            yield opened
    except NoBrowser as error:
        pytest.skip(str(error))
