"""The router's benchmark on a small scale: real router, simulated nodes, gRPC and HTTP; each stream gets its tokens."""

from __future__ import annotations

import json
import os

import pytest

from baton.bench.config import RouterBenchConfig
from baton.bench.micro.router import run
from baton.config import bundled_model_dir


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the router needs a core of its own")
@pytest.mark.parametrize("front", ["grpc", "http"])
def test_all_tokens_and_requests_are_answered(front: str) -> None:
    config = RouterBenchConfig(
        bundled_model_dir(),
        streams=6,
        nodes=4,
        front=front,
        connections=2,
        rounds=2,
        round_s=0.2,
        settle_s=0.1,
        tokens_per_s=120.0,
        requests_per_s=12.0,
        pending_requests=4,
    )
    report = run(config)
    for load in (report.relay, report.half, report.mixed, report.requests):
        assert load.tokens_per_s.median > 0
        assert 0 < load.latency_ms_p50.median <= load.latency_ms_p99.median
    assert report.relay.requests_per_s.median == 0
    assert report.requests.requests_per_s.median > 0
    assert report.router_mb > 0
    told = report.summary()
    assert told["requests_per_s"] == report.requests.requests_per_s.median
    assert told["tokens_per_s"] == report.relay.tokens_per_s.median
    added = report.added_latency_ms
    assert told["added_latency_ms"] == {"p50": added.p50, "p99": added.p99}
    assert report.direct_ms.median > 0
    assert report.placement_us.median > 0
    json.dumps(told, allow_nan=False)
