"""The headers that tell a client of HTTP what it has left of its quotas, in each API, of answers and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.errors import QuotaExceeded
from baton.security.http_access import PageAuthenticator
from baton.security.keys import KeyRing, read_key_file, write_keys
from baton.security.quotas import Quotas, TenantSettings
from router.admission.quotas import RateLimit
from router.http.rate_limits import NAMES, duration
from tests.support.http_rig import CHATS, COMPLETIONS, HELLO, STREAM, HttpRig, authenticator, chunk, finished
from tests.support.router_parts import MODEL

MESSAGE: dict[str, object] = {"model": MODEL, "max_tokens": 5, **HELLO}

LIMITS = [RateLimit("requests", 60, 59, 1.0), RateLimit("tokens", 1000, 400, 36.4)]
SHOWN = {
    "x-ratelimit-limit-requests": "60",
    "x-ratelimit-remaining-requests": "59",
    "x-ratelimit-reset-requests": "1s",
    "x-ratelimit-limit-tokens": "1000",
    "x-ratelimit-remaining-tokens": "400",
    "x-ratelimit-reset-tokens": "37s",
}


def rig_of(folder: Path, settings: TenantSettings) -> tuple[HttpRig, dict[str, str]]:
    """A front, and the headers of a client whose tenant has these settings."""
    _, (key,) = authenticator(folder, "acme")
    (file,) = folder.iterdir()
    write_keys(file, read_key_file(file).keys, {"acme": settings})
    rig = HttpRig(authenticator=PageAuthenticator("127.0.0.1", "", KeyRing(file)))
    rig.handler.limits = LIMITS
    return rig, {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "ab"}),
        (COMPLETIONS, {"prompt": "ab"} | STREAM),
        (CHATS, HELLO),
        ("/v1/messages", MESSAGE),
    ],
)
async def test_answers_and_refusals_tell_what_is_left(tmp_path: Path, path: str, body: dict[str, object]) -> None:
    rig, headers = rig_of(tmp_path, TenantSettings(quotas=Quotas(requests_per_minute=60)))
    answer = await rig.answered(path, body, chunk(0, "c"), finished(), headers=headers)
    assert answer.status == 200
    assert {name: answer.headers.get(name) for name in NAMES} == SHOWN
    refusal = await rig.answered(path, body, QuotaExceeded("requests_per_minute of …", 2.5), headers=headers)
    assert (refusal.status, refusal.headers["retry-after"], refusal.headers["x-should-retry"]) == (429, "3", "true")
    assert refusal.headers["x-ratelimit-remaining-tokens"] == "400"


async def test_a_caller_without_quotas_is_told_nothing(tmp_path: Path) -> None:
    rig, headers = rig_of(tmp_path, TenantSettings(weight=2.0))
    answer = await rig.answered(COMPLETIONS, {"prompt": "ab"}, finished(), headers=headers)
    assert not set(NAMES) & set(answer.headers)


async def test_of_several_prompts_one_counts_as_the_request() -> None:
    rig = HttpRig()
    exchange = rig.post(COMPLETIONS, {"prompt": ["a", "b", "c"]})
    calls = await rig.next_calls(3)
    assert [call.request.is_further_part for call in calls] == [False, True, True]
    embedding = rig.post("/v1/embeddings", {"input": ["a", "b"]})
    inputs = await rig.next_calls(2)
    assert [call.request.is_further_part for call in inputs] == [False, True]
    for call in (*calls, *inputs):
        call.tell(QuotaExceeded("none"))
    for each in (exchange, embedding):
        assert (await each.end()).status == 429


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (0.0191, "20ms"),
        (1.0, "1s"),
        (59.01, "1m0s"),
        (360.0, "6m0s"),
        (3600.0, "1h0m0s"),
        (86_399.5, "24h0m0s"),
    ],
)
def test_times_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
