"""What fuzz tests of the HTTP APIs share: requests to a cluster in virtual time, and the values that bodies get."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from datetime import datetime
from random import Random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from baton.text.chat_template import DEFAULT_TEMPLATE
from baton.text.model_template import ModelTemplate
from router.http.app import HttpFront
from router.http.model import ServedModel
from router.http.responses.store import ResponseStore
from tests.doubles.fake_clock import FakeClock
from tests.doubles.fake_workers import FakeWorkers
from tests.support.fuzzed_cluster import FuzzedCluster, LetterTokenizer
from tests.support.http_client import AsgiClient, Exchange
from tests.support.http_rig import BOUNDS
from tests.support.mutations import mutated

EXAMPLES = int(os.environ.get("BATON_FUZZ_EXAMPLES", "150"))
TEMPLATE = ModelTemplate(DEFAULT_TEMPLATE, {}, workers=FakeWorkers())
fuzzed = settings(
    max_examples=EXAMPLES,
    database=None,
    derandomize=EXAMPLES <= 500,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
NO_NUMBERS: list[Any] = ["1", True, [], {}, [1], 10**400, "\0"]
NO_TEXTS: list[Any] = [1, True, [], {}, ["x"]]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
JUNK = st.sampled_from([b"NaN", b"-Infinity", b"1e999", b'"\\ud800"', b"[" * 70, b'"a":1,', b"null", b"\xff", b"0"])
"""What is inserted into the bytes of a valid body."""


@st.composite
def mutations(draw: st.DrawFn, valid: st.SearchStrategy[dict[str, Any]]) -> bytes:
    """The bytes of a valid body with a few of them changed, removed, repeated or inserted."""
    return mutated(draw, json.dumps(draw(valid)).encode(), 12, JUNK)


@st.composite
def wild_bodies(draw: st.DrawFn, valid: st.SearchStrategy[dict[str, Any]], fields: Iterable[str]) -> bytes:
    """Arbitrary values under known field names."""
    body = draw(valid)
    for name in draw(st.sets(st.sampled_from(sorted(fields)), min_size=1, max_size=4)):
        body[name] = draw(JSON)
    return json.dumps(body).encode()


async def post(
    cluster: FuzzedCluster, path: str, body: bytes, headers: Mapping[str, str], leaves: bool = False
) -> Exchange:
    model = ServedModel(cluster.card, LetterTokenizer(), TEMPLATE, lambda: datetime(2026, 1, 2))
    clock = FakeClock(5.0)
    store = ResponseStore(BOUNDS, clock)
    front = HttpFront(cluster.handler, model, lambda: "", lambda: b"", clock, Random(1), store, 1000.0)
    exchange = AsgiClient(front).post(path, body, headers)
    if leaves:
        exchange.disconnect()
        await exchange.task
        return exchange
    return await exchange.end()
