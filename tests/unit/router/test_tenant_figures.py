"""What operators see of tenants: shares, waiting times, and where a request waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.cli.views.rows import tenant_shares
from baton.errors import Overloaded
from baton.messages.node import NodeDescription, Outcome
from baton.messages.operator import TenantRow, TenantRows
from baton.observe.metrics import Figure, render
from router.admission.limits import DispatchLimits
from router.admission.tenant_figures import MAX_LABELS, OTHERS, TenantFigures
from router.live_requests import LiveRequests
from tests.support.router_parts import decode, prefill
from tests.support.router_rig import Reader, RouterRig, all_leave, router_rig
from tests.unit.router.test_dispatcher_resume import THEIRS, record_lost_router


def row_of(requests: LiveRequests, tenant: str) -> TenantRow:
    (row,) = (row for row in requests.tenant_rows(0).tenants if row.tenant == tenant)
    return row


def small() -> NodeDescription:
    """A node that five requests fill."""
    return decode("d1", max_num_seqs=4, max_num_batched_tokens=64)


async def full_node(rig: RouterRig) -> list[Reader]:
    """Requests of five other tenants, which fill the node. None of them has so much there that others go ahead."""
    return [await rig.accepted(request_id=f"{tenant}0", tenant=tenant, max_tokens=1) for tenant in "cdefg"]


async def test_each_tenant_has_its_own_figures() -> None:
    async with router_rig(small(), limits=DispatchLimits(max_queue=2)) as rig:
        running = await full_node(rig)
        waiting = [await rig.accepted(request_id=f"a{number}", tenant="a", max_tokens=1) for number in range(2)]
        assert (row_of(rig.requests, "a").waiting, row_of(rig.requests, "c").running) == (2, 1)
        other = await rig.accepted(request_id="b0", tenant="b", max_tokens=1)
        with pytest.raises(Overloaded):
            await waiting[1].finished()
        row = row_of(rig.requests, "a")
        assert (row.displaced, row.refused, row.waiting) == (1, 1, 1)
        rig.timers.advance(0.5)
        for _ in range(7):
            await rig.serve("d1")
        for reader in (*running, waiting[0], other):
            await reader.finished()
        row = row_of(rig.requests, "a")
        # A prompt of five tokens, and one generated token, which counts as two.
        assert (row.served_tokens, row.served_last_minute, row.service_class) == (7, 7, "normal")
        assert (row.placed_last_minute, row.waited_s_last_minute) == (1, 0.5)
        assert row_of(rig.requests, "c").served_tokens == 7
        page = render(rig.requests.tenants.figures(), {}).decode()
        assert 'baton_tenant_service_tokens_total{tenant="a"} 7.0' in page
        assert 'baton_tenant_queue_seconds_sum{tenant="b"} 0.5' in page
        assert 'baton_tenant_displaced_total{tenant="a"} 1.0' in page
        assert 'baton_tenant_lag_tokens{tenant="b"}' in page
        rig.timers.advance(61.0)
        row = row_of(rig.requests, "a")
        assert (row.served_tokens, row.served_last_minute, row.placed_last_minute) == (7, 0, 0)


def test_metrics_of_tenants_have_as_few_labels_as_others() -> None:
    tenants = TenantFigures(lambda tenant: 5.0)
    for number in range(2 * MAX_LABELS):
        tenants.served(f"t{number}", 1.0, 0.0)
    tenants.placed("", "normal", 1.0, 0.0, 0.0)
    counts = {
        figure.labels["tenant"]: figure.value
        for figure in tenants.figures()
        if isinstance(figure, Figure) and figure.name == "tenant_service_tokens_total"
    }
    assert len(counts) == MAX_LABELS + 1
    assert counts[OTHERS] == MAX_LABELS
    assert "" not in counts, "where nobody has a key there are no tenants"
    rows = tenants.rows({"t7": 1}, {"t8": 1}, 0.0, limit=2)
    assert ([row.tenant for row in rows.tenants], rows.served_last_minute) == (["t8", "t7"], 2 * MAX_LABELS)
    (row,) = tenants.rows({}, {"starved": 1}, 0.0, limit=1).tenants
    assert row.tenant == "starved"


def test_shares_are_those_of_all_routers() -> None:
    row = TenantRow("a", "normal", 1.0, 1, 0, 90.0, 60.0, 2, 3.0, 5.0, 0, 1)
    left_out = TenantRows([row], served_last_minute=140.0)
    other = replace(row, tenant="b", served_last_minute=40.0)
    more = replace(row, service_class="urgent", weight=3.0, served_last_minute=20.0, placed_last_minute=4)
    first, second = tenant_shares([left_out, TenantRows([more, other], served_last_minute=60.0)])
    assert (first.row.tenant, first.share, second.share) == ("a", 0.4, 0.2)
    assert (first.row.service_class, first.row.weight, first.row.running, first.row.mean_wait_s) == (
        "normal,urgent",
        3.0,
        2,
        1.0,
    )


async def test_operators_see_what_is_before_a_request_and_its_client_nothing_of_others() -> None:
    async with router_rig(small(), limits=DispatchLimits(queue_wait_s=1.0)) as rig:
        running = await full_node(rig)
        first, second = [await rig.accepted(request_id=f"a{number}", tenant="a") for number in range(2)]
        behind = await rig.accepted(request_id="b0", tenant="b")
        place, own = rig.requests.queue_place("b/b0"), rig.requests.queue_place("a/a1")
        assert place is not None
        assert own is not None
        assert (place.tenants_before, place.own_before) == (1, 0)
        assert (own.tenants_before, own.own_before) == (0, 1)
        assert "has as many requests as it runs" in place.why
        assert rig.requests.queue_place("c/c0") is None
        rig.timers.advance(1.1)
        assert "has as many requests as it runs" in str(await second.raises(Overloaded))
        assert str(await behind.raises(Overloaded)) == "requests of others are before this one"
        await first.raises(Overloaded)
        await all_leave(*running)


async def test_explain_has_the_counters_before_the_request_was_charged() -> None:
    async with router_rig(decode()) as rig:
        for request_id in ("a0", "a1"):
            reader = rig.ask(request_id=request_id, tenant="a", max_tokens=1)
            await rig.serve("d1")
            await reader.finished()
        counters = []
        for request_id in ("a/a0", "a/a1"):
            (told,) = rig.requests.placer.explain(request_id, 0.0)
            assert told.decision.standing is not None
            counters.append((told.decision.standing.counter, told.decision.standing.virtual_time))
        assert counters == [(0.0, 0.0), (7.0, 0.0)]


@pytest.mark.parametrize("names", [("p1", "d1"), ("d1",)])
async def test_the_rest_of_an_adopted_request_is_charged_and_not_what_its_client_had(names: tuple[str, ...]) -> None:
    nodes = [prefill(), decode()][-len(names) :]
    async with router_rig(*nodes) as rig:
        record_lost_router(rig, prefill() if "p1" in names else None, decode())
        reader = rig.resume("r", 2)
        assert await rig.next_adopts(*names) == THEIRS
        rig.report("d1", THEIRS, 0, "abc")
        if "p1" in names:
            rig.report("p1", THEIRS, outcome=Outcome.UNKNOWN)
        await rig.end(reader, "d1", THEIRS, 3, "def")
        # Four more tokens, each of which counts as two.
        assert row_of(rig.requests, "").served_tokens == 8
