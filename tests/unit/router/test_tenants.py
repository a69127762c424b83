"""Tenants are separate in requests, cached prefixes and quotas, and no metric has a key."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

import pytest

from baton.errors import DuplicateRequest, InvalidRequest, QuotaExceeded, RequestNotFound
from baton.messages.generation import Accepted, Finished, GenerateEvent, GenerateRequest, ModelCard
from baton.messages.ids import SCOPED_ID_PATTERN, scoped, unscoped
from baton.messages.node import Outcome
from baton.security.matrix import Caller, CallerRole, current_caller
from router.admission.limits import DispatchLimits
from router.admission.tenant_figures import MAX_LABELS, OTHERS
from router.admission.tenants import Tenants
from router.front import GenerationHandler
from tests.doubles.fake_tokenizer import FakeTokenizer
from tests.support.router_parts import MODEL, decode
from tests.support.router_rig import Reader, RouterRig, router_rig

CARD = ModelCard(MODEL, 64, 300)


class Fronts:
    """The front, called as each tenant."""

    def __init__(self, rig: RouterRig) -> None:
        self.tenants = Tenants()
        self.handler = GenerationHandler(rig.dispatcher, FakeTokenizer(), lambda: CARD, self.tenants)

    def ask(
        self,
        tenant: str,
        request_id: str = "r",
        most: int | None = None,
        min_priority: int | None = None,
        **fields: object,
    ) -> AsyncGenerator[GenerateEvent, None]:
        request = GenerateRequest("hello", request_id=request_id, max_tokens=2, **fields)  # type: ignore[arg-type]
        return self.by(tenant, most, min_priority).run(self.handler.generate, request, None)

    def by(self, tenant: str, most: int | None = None, min_priority: int | None = None) -> contextvars.Context:
        context = contextvars.copy_context()
        context.run(current_caller.set, Caller(CallerRole.CLIENT, tenant, "id", most, min_priority))
        return context

    def figures(self) -> dict[tuple[str, str], float]:
        return {(figure.name, figure.labels["tenant"]): figure.value for figure in self.tenants.figures()}


async def test_two_tenants_may_use_the_same_request_id() -> None:
    async with router_rig(decode()) as rig:
        fronts = Fronts(rig)
        first, second = fronts.ask("acme", cache_salt="s"), fronts.ask("umbrella", cache_salt="s")
        readers = [Reader(first), Reader(second)]
        submits = [await rig.next_submit("d1"), await rig.next_submit("d1")]
        assert [submit.attempt.request_id for submit in submits] == ["acme/r", "umbrella/r"]
        assert [submit.spec.cache_salt for submit in submits] == ["acme/s", "umbrella/s"]
        with pytest.raises(DuplicateRequest, match=r"'r'"):
            await anext(fronts.ask("acme"))
        for submit in submits:
            rig.report("d1", submit.attempt, 0, "ab", Outcome.LENGTH)
        for reader in readers:
            await reader.finished()
            assert reader.accepted.request_id == "r", "nothing of the tenant is in what clients see"


@pytest.mark.parametrize(
    ("tenant", "of_key", "of_router", "asked", "given"),
    [
        ("acme", None, None, 0, 0),
        ("acme", None, None, 2**31 - 1, 2**31 - 1),
        ("acme", None, None, -1, "must be 0 to 2147483647, the range of this router, not -1"),
        ("acme", None, -5, -5, -5),
        ("acme", None, -5, -6, "must be -5 to 2147483647, the range of this router, not -6"),
        ("acme", -7, 0, -7, -7),
        ("acme", 0, -5, -1, "must be 0 to 2147483647, the range of this API key, not -1"),
        ("acme", 100, 0, 0, 100),
        ("acme", 100, 0, 99, "must be 100 to 2147483647, the range of this API key, not 99"),
        ("", None, 0, -(2**31), "must be 0 to 2147483647, the range of this router, not -2147483648"),
        ("", None, 0, 2**31, "not 2147483648"),
        ("", None, 3, 0, 3),
    ],
)
async def test_a_client_gets_the_priority_that_its_key_or_the_router_allows(
    tenant: str, of_key: int | None, of_router: int | None, asked: int, given: int | str
) -> None:
    limits = DispatchLimits() if of_router is None else DispatchLimits(min_priority=of_router)
    async with (
        router_rig(decode(), limits=limits) as rig,
        aclosing(Fronts(rig).ask(tenant, min_priority=of_key, priority=asked)) as events,
    ):
        if isinstance(given, str):
            with pytest.raises(InvalidRequest, match=f"priority: .*{given}"):
                await anext(events)
            return
        assert isinstance(await anext(events), Accepted)
        reader = Reader(events)
        submit = await rig.next_submit("d1")
        assert submit.spec.priority == given
        await rig.end(reader, "d1", submit.attempt, 0, "ab")


async def test_another_tenants_request_is_not_found() -> None:
    async with router_rig(decode()) as rig:
        fronts = Fronts(rig)
        async with aclosing(fronts.ask("acme")) as events:
            assert isinstance(await anext(events), Accepted)
            attempt = await rig.next_attempt("d1")
            for tenant, name in (("umbrella", "r"), ("umbrella", "acme/r"), ("", "r"), ("acme", "acme/r")):
                with pytest.raises(RequestNotFound) as caught:
                    await asyncio.create_task(fronts.handler.cancel(name), context=fronts.by(tenant))
                assert "acme" not in str(caught.value)
                async with aclosing(fronts.by(tenant).run(fronts.handler.resume, name, [0], None)) as resumed:
                    with pytest.raises(RequestNotFound):
                        await anext(resumed)
            context = fronts.by("acme")
            async with aclosing(context.run(fronts.handler.resume, "r", [0], None)) as resumed:
                assert isinstance(await anext(resumed), Accepted)
                rig.report("d1", attempt, 0, "ab", Outcome.LENGTH)
                assert [event async for event in resumed][1:]


async def test_a_client_can_not_choose_its_tenant() -> None:
    async with router_rig(decode()) as rig:
        fronts = Fronts(rig)
        for tenant in ("acme", ""):
            with pytest.raises(InvalidRequest, match="request_id"):
                await anext(fronts.ask(tenant, "umbrella/r"))
        with pytest.raises(InvalidRequest, match="request_id"):
            await anext(fronts.ask("acme", "x" * 65))


async def test_an_answer_that_is_over_and_not_read_yet_is_no_part_of_the_quota() -> None:
    async with router_rig(decode()) as rig:
        fronts = Fronts(rig)
        async with aclosing(fronts.ask("acme", "a", most=1)) as ended:
            await anext(ended)
            await rig.serve("d1", text="ab")
            while not isinstance(await anext(ended), Finished):
                pass
            await fronts.ask("acme", "b", most=1).aclose()
        assert fronts.figures()["tenant_requests_running", "acme"] == 0


async def test_the_quota_limits_running_requests_and_is_freed_when_they_end() -> None:
    async with router_rig(decode()) as rig:
        fronts = Fronts(rig)
        async with aclosing(fronts.ask("acme", "a", most=2)) as first, aclosing(fronts.ask("acme", "b", most=2)):
            await anext(first)
            with pytest.raises(QuotaExceeded, match="max_concurrent of tenant acme: 2 requests"):
                fronts.ask("acme", "c", most=2)
            async with aclosing(fronts.ask("umbrella", "c", most=2)):
                figures = fronts.figures()
            assert (figures["tenant_requests_running", "acme"], figures["tenant_requests_running", "umbrella"]) == (
                2,
                1,
            )
        assert fronts.figures() == {
            ("tenant_requests_total", "acme"): 2,
            ("tenant_requests_total", "umbrella"): 1,
            ("tenant_requests_running", "acme"): 0,
            ("tenant_requests_running", "umbrella"): 0,
            ("tenant_requests_refused_total", "acme"): 1,
        }
        again = fronts.ask("acme", "c", most=1)
        await again.aclose()
        await again.aclose()
        assert fronts.figures()["tenant_requests_running", "acme"] == 0


async def test_the_number_of_labels_is_bounded() -> None:
    async with router_rig(decode()) as rig:
        fronts = Fronts(rig)
        for number in range(3 * MAX_LABELS):
            await fronts.ask(f"t-{number}").aclose()
        figures = fronts.figures()
        assert len(figures) == 2 * (MAX_LABELS + 1)
        assert figures["tenant_requests_total", OTHERS] == 2 * MAX_LABELS


@pytest.mark.parametrize(
    ("fairness", "expected"), [("tokens", "u0 b0 u1 a0 u2 a1 a2 b1 b2 c0"), ("off", "c0 b0 b1 b2 a0 a1 a2 u0 u1 u2")]
)
async def test_waiting_requests_are_served_by_the_classes_and_weights_of_their_keys(
    fairness: Literal["tokens", "off"], expected: str
) -> None:
    callers = {
        "c": {"service_class": "batch"},
        "b": {},
        "a": {"weight": 3.0},
        "u": {"service_class": "urgent"},
    }
    full = decode(max_num_seqs=4, max_num_batched_tokens=64)
    async with router_rig(full, limits=DispatchLimits(fairness=fairness)) as rig:
        # Five tenants fill the node, so that none has so much there that others go ahead of it.
        fronts, sent = Fronts(rig), list[str]()
        readers = [await rig.accepted(max_tokens=2, tenant=f"f{number}") for number in range(5)]
        for tenant, settings in callers.items():
            context = contextvars.copy_context()
            context.run(current_caller.set, Caller(CallerRole.CLIENT, tenant, **settings))  # type: ignore[arg-type]
            for number in range(1 if tenant == "c" else 3):
                request = GenerateRequest("hello", request_id=f"{tenant}{number}", max_tokens=2)
                readers.append(Reader(context.run(fronts.handler.generate, request, None)))
                await readers[-1].wait_until_accepted()
        for _ in readers:
            attempt = await rig.next_attempt("d1")
            sent.append(unscoped(attempt.request_id))
            rig.report("d1", attempt, 0, "ab", Outcome.LENGTH)
        for reader in readers:
            await reader.finished()
        assert " ".join(sent[5:]) == expected


def test_request_ids_are_prefixed_with_their_tenant() -> None:
    assert scoped("acme", "r") == "acme/r"
    assert unscoped("acme/r") == unscoped("r") == "r"
    assert SCOPED_ID_PATTERN.match("acme/r")
    assert not SCOPED_ID_PATTERN.match("acme/b/r")
    assert not SCOPED_ID_PATTERN.match("acme/")
