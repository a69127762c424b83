"""Cluster tests run over both kinds of transport: one copies inside the call, the other is truly asynchronous.

Tests marked `one_transport` run over the first alone: their subject is what is computed from blocks, not how they move.
"""

from __future__ import annotations

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    transports = {"default": "default", "tcp": "tcp,self"}
    if metafunc.definition.get_closest_marker("one_transport"):
        del transports["tcp"]
    metafunc.parametrize("transport", transports.values(), ids=transports.keys(), indirect=True)


@pytest.fixture(autouse=True)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """UCX reads its environment when an agent is made, so one process can try both."""
    chosen = str(request.param)
    if chosen == "default":
        monkeypatch.delenv("UCX_TLS", raising=False)
    else:
        monkeypatch.setenv("UCX_TLS", chosen)
    return chosen
