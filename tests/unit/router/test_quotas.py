"""Quotas of requests at the router's front: what they take, give back and are refused for, over two routers."""

from __future__ import annotations

import contextvars
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from baton.errors import Cancelled, DuplicateRequest, QuotaExceeded, QuotaTooSmall, QuotaUnknown
from baton.messages.generation import GenerateEvent, GenerateRequest, ModelCard
from baton.messages.ids import AttemptKey
from baton.messages.node import Outcome, Submit
from baton.messages.sampling import SamplingParams
from baton.registry.quotas import LEASE_S
from baton.security.matrix import Caller, CallerRole, current_caller
from baton.security.quotas import Quotas
from router.admission.quotas import RateLimit, RateLimiter
from router.admission.request import ValidRequest
from router.admission.tenants import Tenants
from router.front import GenerationHandler
from tests.doubles.fake_clock import FakeClock
from tests.doubles.fake_quotas import FakeQuotas, FakeQuotaServer
from tests.doubles.fake_tokenizer import FakeTokenizer
from tests.support.router_parts import MODEL, decode, prefill
from tests.support.router_rig import Reader, RouterRig, router_rig

CARD = ModelCard(MODEL, 64, 300)
ACME = Caller(CallerRole.CLIENT, "acme", "key1")
FIVE_TOKENS = "hello"


class Front:
    """The front of one router, called by whom the test says."""

    def __init__(self, rig: RouterRig, server: FakeQuotaServer, name: str) -> None:
        self.rig = rig
        self._count = 0
        self.store = FakeQuotas(server)
        self.tenants = Tenants(limiter=RateLimiter(self.store, server.clock, name))
        self.handler = GenerationHandler(rig.dispatcher, FakeTokenizer(), lambda: CARD, self.tenants)

    def ask(self, caller: Caller, **fields: Any) -> AsyncGenerator[GenerateEvent, None]:
        asked: dict[str, Any] = {"prompt": FIVE_TOKENS, "max_tokens": 2, **fields}
        request = GenerateRequest(**asked)
        return self.by(caller).run(self.handler.generate, request, None)

    async def served(self, caller: Caller, text: str = "ab", **fields: Any) -> None:
        """Let a request be served to its end."""
        self._count += 1
        name = f"served-{self._count}"
        reader = Reader(self.ask(caller, request_id=name, **fields))
        while True:
            message = await self.rig.nodes["d1"].inbox.get()
            if isinstance(message, Submit) and message.attempt.request_id == f"{caller.tenant}/{name}":
                break
        self.rig.report("d1", message.attempt, 0, text, Outcome.LENGTH)
        await reader.finished()

    async def refused(self, caller: Caller, **fields: Any) -> QuotaExceeded:
        async with aclosing(self.ask(caller, **fields)) as events:
            with pytest.raises(QuotaExceeded) as caught:
                await anext(events)
        return caught.value

    def limits(self, caller: Caller) -> list[RateLimit]:
        return list(self.by(caller).run(self.handler.rate_limits))

    def by(self, caller: Caller) -> contextvars.Context:
        context = contextvars.copy_context()
        context.run(current_caller.set, caller)
        return context

    def refusals(self) -> dict[str, float]:
        found = [each for each in self.tenants.figures() if each.name == "tenant_requests_refused_total"]
        return {figure.labels["why"]: figure.value for figure in found}


class TwoRouters:
    def __init__(self, one: RouterRig, two: RouterRig) -> None:
        self.server = FakeQuotaServer(FakeClock(1000.0))
        self.one, self.two = Front(one, self.server, "router-1.a"), Front(two, self.server, "router-2.a")


@asynccontextmanager
async def two_routers() -> AsyncIterator[TwoRouters]:
    async with router_rig(decode()) as one, router_rig(decode()) as two:
        yield TwoRouters(one, two)


def of_tenant(**limits: int) -> Caller:
    quotas = Quotas(**limits)
    most = quotas.max_concurrent
    return replace(ACME, tenant_quotas=quotas, max_concurrent=most, is_counted=most is not None)


def of_key(**limits: int) -> Caller:
    return replace(ACME, key_quotas=Quotas(**limits))


async def test_a_caller_without_quotas_asks_nobody() -> None:
    async with two_routers() as routers:
        await routers.one.served(ACME)
        assert routers.server.num_calls == 0
        assert not routers.one.limits(ACME)


@pytest.mark.parametrize("quota", ["tokens_per_minute", "tokens_per_day"])
async def test_tokens_are_counted_over_all_routers(quota: str) -> None:
    caller = of_tenant(**{quota: 20})
    period_s = {"tokens_per_minute": 60.0, "tokens_per_day": 86_400.0}[quota]
    async with two_routers() as routers:
        await routers.one.served(caller)
        await routers.two.served(replace(caller, key_id="key2"))
        # 14 are used, and 7 are wanted.
        error = await routers.two.refused(caller)
        assert str(error).startswith(f"{quota} of tenant acme: 20 tokens a ")
        assert (error.retryable, error.retry_after_s) == (True, pytest.approx(period_s / 20))
        routers.server.clock.advance(period_s / 20)
        await routers.one.served(caller)
        await routers.two.served(replace(caller, tenant="other"))
        assert routers.two.refusals() == {quota: 1}


async def test_requests_are_counted_by_key_and_a_call_of_several_parts_once() -> None:
    caller = of_key(requests_per_minute=2)
    async with two_routers() as routers:
        await routers.one.served(caller)
        await routers.two.served(caller)
        await routers.two.served(caller, is_further_part=True)
        error = await routers.one.refused(caller)
        assert str(error).startswith("requests_per_minute of this API key: 2 requests a minute")
        assert error.retry_after_s == pytest.approx(30)
        await routers.one.served(replace(caller, key_id="key2"))


async def test_what_was_not_generated_comes_back() -> None:
    caller = of_tenant(tokens_per_minute=100)
    async with two_routers() as routers:
        await routers.one.served(caller, "ab", max_tokens=50)
        (limit,) = routers.one.limits(caller)
        assert replace(limit, reset_s=round(limit.reset_s, 6)) == RateLimit("tokens", 100, 93, 4.2)
        events = routers.one.ask(caller, max_tokens=50, request_id="left")
        await anext(events)
        attempt = await routers.one.rig.next_attempt("d1")
        routers.one.rig.report("d1", attempt, 0, "abc")
        await anext(events)
        await events.aclose()
        # Five of the prompt and three of the output, for each: 7 + 8.
        await routers.two.served(caller, max_tokens=1, text="a")
        assert routers.two.limits(caller)[0].remaining == 100 - 7 - 8 - 6


async def test_a_request_that_was_never_served_costs_no_tokens() -> None:
    caller = of_tenant(tokens_per_minute=30)
    async with two_routers() as routers, aclosing(routers.one.ask(caller, request_id="r")) as events:
        await anext(events)
        for _ in range(9):
            async with aclosing(routers.one.ask(caller, request_id="r")) as refused:
                with pytest.raises(DuplicateRequest):
                    await anext(refused)


async def test_a_request_that_may_be_larger_than_a_limit_takes_all_of_it() -> None:
    caller = of_tenant(tokens_per_minute=20)
    async with two_routers() as routers:
        async with aclosing(routers.one.ask(caller, max_tokens=50)) as events:
            await anext(events)
            assert routers.one.limits(caller)[0].remaining == 0
        error = await routers.two.refused(caller, prompt="x" * 21)
        assert "21 tokens in its prompt alone: shorten it" in str(error)
        assert isinstance(error, QuotaTooSmall)
        assert not error.retryable


async def test_concurrent_requests_are_counted_over_all_routers_until_a_router_has_died() -> None:
    caller = of_tenant(max_concurrent=2)
    async with two_routers() as routers:
        one, two = routers.one, routers.two
        async with aclosing(one.ask(caller)) as first, aclosing(two.ask(caller)) as second:
            await anext(first)
            await anext(second)
            for front in (one, two):
                error = await front.refused(caller)
                assert str(error) == "max_concurrent of tenant acme: 2 requests, as many as may, run"
            # The first router dies with its request.
            routers.server.clock.advance(LEASE_S - 0.1)
            await two.store.renew()
            await two.refused(caller)
            routers.server.clock.advance(0.2)
            await two.served(caller)
        await one.served(of_tenant(max_concurrent=1))


async def test_an_old_limit_of_a_key_is_of_its_tenants_requests_with_any_key() -> None:
    limited, other = replace(ACME, max_concurrent=1, is_counted=True), replace(ACME, key_id="key2", is_counted=True)
    async with two_routers() as routers, aclosing(routers.one.ask(other)) as first:
        await anext(first)
        await routers.two.refused(limited)
        await routers.two.served(other)
        own = of_key(max_concurrent=1)
        async with aclosing(routers.two.ask(own)) as second:
            await anext(second)
            assert "max_concurrent of this API key: 1 requests" in str(await routers.one.refused(own))


async def test_requests_with_quotas_are_refused_while_nobody_knows_what_is_used() -> None:
    caller = of_tenant(tokens_per_minute=100)
    async with two_routers() as routers:
        routers.server.up = False
        async with aclosing(routers.one.ask(caller)) as events:
            with pytest.raises(QuotaUnknown) as caught:
                await anext(events)
        assert caught.value.retryable
        assert routers.one.refusals() == {"unreachable": 1}
        await routers.one.served(ACME)
        routers.server.up = True
        await routers.one.served(caller)


async def test_a_stream_that_goes_on_is_paid_for_once() -> None:
    caller = replace(of_tenant(tokens_per_minute=100), key_quotas=Quotas(max_concurrent=1))
    async with two_routers() as routers:
        front, rig = routers.one, routers.one.rig
        begun = Reader(front.ask(caller, request_id="r", max_tokens=40))
        attempt = await rig.next_attempt("d1")
        rig.report("d1", attempt, 0, "ab")
        await begun.wait_for_tokens(2)
        # The stream that it continues still has the only place.
        context = front.by(caller)
        resumed = Reader(context.run(front.handler.resume, "r", [2], None))
        await begun.raises(Cancelled)
        await rig.end(resumed, "d1", attempt, 2, "cd")
        assert front.limits(caller)[0].remaining == 100 - 9
        left, attempt = Reader(front.ask(caller, request_id="s", max_tokens=4)), await rig.next_attempt("d1")
        rig.report("d1", attempt, 0, "ab")
        await left.wait_for_tokens(2)
        await left.leaves()
        await rig.next_abort("d1")
        again = Reader(context.run(front.handler.resume, "s", [2], None, repeat=GenerateRequest(FIVE_TOKENS)))
        await rig.end(again, "d1", await rig.next_adopt("d1"), 0, "abcd")
        await front.served(caller, max_tokens=1, text="a")
        assert front.limits(caller)[0].remaining == 100 - 9 - 9 - 6


@pytest.mark.parametrize("names", [("p1", "d1"), ("d1",)])
async def test_a_stream_of_another_router_goes_on_with_its_class_and_weight_and_pays_for_the_rest(
    names: tuple[str, ...],
) -> None:
    caller = replace(of_tenant(tokens_per_minute=100), weight=5.0, service_class="batch")
    request = ValidRequest((5, 6, 7), SamplingParams(seed=5, max_tokens=20), request_id="acme/r", model=MODEL)
    attempt = AttemptKey("acme/r", 2, 99)
    async with router_rig(*[prefill(), decode()][-len(names) :]) as rig:
        server = FakeQuotaServer(FakeClock(1000.0))
        front = Front(rig, server, "router-1.a")
        rig.left_behind(request, attempt, prefill() if "p1" in names else None, decode())
        reader = Reader(front.by(caller).run(front.handler.resume, "r", [4], None))
        assert await rig.next_adopts(*names) == attempt
        rig.report("d1", attempt, 0, "abcd")
        if "p1" in names:
            rig.report("p1", attempt, outcome=Outcome.UNKNOWN)
        await rig.end(reader, "d1", attempt, 4, "efghij")
        assert front.limits(caller)[0].remaining == 100 - 6
        (row,) = rig.requests.tenant_rows(0).tenants
        assert (row.service_class, row.weight) == ("batch", 5.0)
