"""Cluster tests run over both kinds of transport: one copies inside the call, the other is truly asynchronous.

Tests marked `one_transport` run over the first alone: their subject is what is computed from blocks, not how they move.
A test whose cases name a `transport` runs each over that one: blocks move in the same way for all of them.
"""

from __future__ import annotations

import pytest

from tests.support.forked_commands import fork_server


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if any("transport" in mark.kwargs.get("indirect", ()) for mark in metafunc.definition.iter_markers("parametrize")):
        return
    is_one = metafunc.definition.get_closest_marker("one_transport")
    metafunc.parametrize("transport", ["default"] if is_one else ["default", "tcp"], indirect=True)


@pytest.fixture(autouse=True)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """UCX reads its environment when an agent is made, so one process can try both."""
    chosen = str(request.param)
    if chosen == "default":
        monkeypatch.delenv("UCX_TLS", raising=False)
    else:
        monkeypatch.setenv("UCX_TLS", f"{chosen},self")
    return chosen


@pytest.fixture(scope="session")
def forked_commands() -> None:
    """Commands are forked from now on, and start at once."""
    fork_server()
