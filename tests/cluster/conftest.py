"""Every cluster test runs over both kinds of transport: one copies inside the call, the other is truly asynchronous."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, params=["default", "tcp,self"], ids=["default", "tcp"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """UCX reads its environment when an agent is made, so one process can try both."""
    chosen = str(request.param)
    if chosen == "default":
        monkeypatch.delenv("UCX_TLS", raising=False)
    else:
        monkeypatch.setenv("UCX_TLS", chosen)
    return chosen
