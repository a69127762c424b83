"""Adapters at a router: names become digests, requests go to nodes that acknowledge theirs, and operators' commands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from baton.errors import (
    AdapterRefused,
    AttemptsExhausted,
    InvalidRequest,
    NoCapacity,
    Overloaded,
    UnknownModel,
    UnsupportedRequest,
)
from baton.messages.adapters import MAX_ADAPTERS, AdapterList, AdapterRefusal, AdapterSource, LoadedAdapter
from baton.messages.node import Leg, NodeDescription, Outcome, RequestDelta, Submit
from baton.messages.node_model import GENERATES, Capability
from baton.model_formats.adapters import AdapterInfo
from baton.registry import DesiredChange, DesiredState
from baton.registry.desired import NamedAdapter
from router.flight.flight_attempt import MAX_REFUSALS
from router.operations.adapters import ACKNOWLEDGE_S, CHECK_EVERY_S, MAX_LOADING, ClusterAdapters
from router.operations.cluster_events import EventRing
from tests.support.router_parts import MODEL, decode, prefill
from tests.support.router_rig import RouterRig, router_rig

A, B = "a" * 64, "b" * 64
CAN = GENERATES | {Capability.LORA}
P1, D1, D2 = (replace(node, capabilities=CAN) for node in (prefill(), decode(), decode("d2")))


def info(digest: str) -> AdapterInfo:
    return AdapterInfo(digest, 8, 1024, 3)


class Adapters:
    """The adapters of a router; what operators want is kept here instead of in a registry."""

    def __init__(self, rig: RouterRig) -> None:
        self.rig = rig
        self.state = DesiredState()
        self.events = EventRing("router-1.a", rig.timers.monotonic)
        self.cluster = ClusterAdapters(
            MODEL,
            rig.dispatcher.requests,
            rig.view,
            rig.links,
            rig.timers,
            self.events,
            rig.fakes.connect,
            self._write,
            self._set_names,
        )

    async def _write(self, change: DesiredChange) -> None:
        # A registry takes its time.
        await asyncio.sleep(0)
        self.state = change.applied_to(self.state)
        self.cluster.take_desired(self.state)

    def _set_names(self, names: Mapping[str, AdapterSource]) -> None:
        self.rig.card = replace(self.rig.card, adapters=names)

    async def load(self, name: str, digest: str, *nodes: str, **options: bool) -> None:
        """Load an adapter that these nodes have in /NAME, and which they acknowledge."""
        for node in nodes:
            self.rig.nodes[node].adapters[f"/{name}"] = info(digest)
        loading = self.begin_loading(name, f"/{name}", **options)
        for node in nodes:
            await self.listed(node)
            self.acknowledge(node, digest)
        await loading
        for node in self.rig.nodes:
            if node not in nodes:
                await self.listed(node)

    def begin_loading(self, name: str, directory: str, **options: bool) -> asyncio.Task[LoadedAdapter]:
        return asyncio.create_task(self.cluster.load_adapter(name, directory, **options))

    async def wait_for(self, loading: asyncio.Task[LoadedAdapter], *reporting: str) -> None:
        """Let time pass until the load is over, or no node can be waited for; these nodes report meanwhile."""
        for _ in range(int(ACKNOWLEDGE_S / CHECK_EVERY_S) + 1):
            await self.rig.timers.is_due(CHECK_EVERY_S)
            self.rig.timers.advance(CHECK_EVERY_S)
            for node in reporting:
                self.rig.nodes[node].report()
            for _ in range(5):
                await asyncio.sleep(0)
            if loading.done():
                break

    def want(self, sources: Iterable[AdapterSource]) -> None:
        """Let the registry name these adapters, too."""
        texts = {NamedAdapter(source).text for source in sources}
        self.state = replace(self.state, adapters=self.state.adapters | texts)
        self.cluster.take_desired(self.state)

    async def served(self, name: str, text: str = "a") -> Submit:
        """Let a node serve the next request to its end; return its leg."""
        leg = await self.rig.next_submit(name)
        self.rig.report(name, leg.attempt, len(leg.output_token_ids), text, Outcome.STOP, stop_token_id=ord(text[-1]))
        return leg

    async def listed(self, node: str) -> dict[str, str]:
        """The digest of each name in the next message to a node, which must be a list of adapters."""
        message = await self.rig.nodes[node].inbox.get()
        assert isinstance(message, AdapterList), message
        return {source.name: source.digest for source in message.adapters}

    def acknowledge(self, node: str, *digests: str) -> None:
        self.rig.nodes[node].report(adapters=dict.fromkeys(digests, ""))

    def reasons(self) -> list[str]:
        return [event.reason for event in self.events.after(0)]


@asynccontextmanager
async def adapters_of(*nodes: NodeDescription) -> AsyncIterator[Adapters]:
    async with router_rig(*nodes) as rig:
        yield Adapters(rig)


# --- requests ---


async def test_both_legs_go_to_nodes_that_acknowledge_the_adapter_and_have_its_digest() -> None:
    async with adapters_of(P1, D1, D2) as adapters:
        rig = adapters.rig
        await adapters.load("one", A, "p1", "d2")
        for _ in range(3):
            reader = rig.ask(model="one")
            legs = [await rig.next_submit("p1"), await rig.next_submit("d2")]
            assert [(leg.leg, leg.spec.adapter) for leg in legs] == [(Leg.PREFILL, A), (Leg.DECODE, A)]
            rig.report("p1", legs[0].attempt, 0, "a", Outcome.HANDED_OFF)
            rig.report("d2", legs[0].attempt, 1, "b", Outcome.STOP, stop_token_id=98)
            await reader.finished()
        assert rig.nodes["d1"].inbox.empty()
        base = rig.ask()
        submit = await rig.next_submit("p1")
        assert submit.spec.adapter == ""
        await base.leaves()


async def test_unknown_and_unloaded_names_are_refused_and_running_requests_keep_their_adapter() -> None:
    async with adapters_of(D1, D2) as adapters:
        rig = adapters.rig
        await rig.ask(model="one").raises(UnknownModel)
        await adapters.load("one", A, "d1", "d2")
        reader = rig.ask(model="one", request_id="r")
        first = await _taken(rig)
        await adapters.cluster.unload_adapter("one")
        await rig.ask(model="one").raises(UnknownModel)
        # The node dies: the request goes on elsewhere with the adapter that has no name any more.
        here, there = first
        rig.report(here, there.attempt, 0, "ab")
        await rig.nodes[here].all_read()
        rig.nodes[here].die()
        other = "d2" if here == "d1" else "d1"
        again = await adapters.served(other, "c")
        assert (again.spec.adapter, list(again.output_token_ids)) == (A, [97, 98])
        await reader.finished()
        assert rig.nodes[other].inbox.empty(), "its adapter was on the list as long as it ran"
        adapters.cluster.check()
        assert await adapters.listed(other) == {}


async def _taken(rig: RouterRig) -> tuple[str, Submit]:
    """The node that gets the next leg, and the leg."""
    waits = {asyncio.create_task(node.inbox.get()): name for name, node in rig.nodes.items()}
    (done, *_), others = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    message = done.result()
    assert isinstance(message, Submit)
    return waits[done], message


async def test_a_node_that_lost_an_adapter_hurts_nobody_and_another_one_takes_the_request() -> None:
    async with adapters_of(D1, D2) as adapters:
        rig = adapters.rig
        await adapters.load("one", A, "d1", "d2")
        reader = rig.ask(model="one")
        node, submit = await _taken(rig)
        other = "d2" if node == "d1" else "d1"
        rig.nodes[node].report(adapters={A: "its files have changed"})
        gone = RequestDelta(submit.attempt, outcome=Outcome.ADAPTER_UNAVAILABLE, error="its files have changed")
        rig.nodes[node].report(gone)
        assert (await adapters.served(other)).spec.adapter == A
        await reader.finished()
        assert not rig.requests.placer.open_breakers(rig.timers.monotonic())
        (row,) = adapters.cluster.list_adapters()
        assert (row.nodes, row.refusals) == ([other], [AdapterRefusal(node, "its files have changed")])
        assert adapters.reasons() == ["AdapterLoaded", "AdapterRefused"]
        # Now the other one loses it, too: the next request ends with the reason, and later ones at once.
        reader = rig.ask(model="one")
        submit = await rig.next_submit(other)
        rig.nodes[other].report(adapters={A: "gone"})
        rig.nodes[other].report(RequestDelta(submit.attempt, outcome=Outcome.ADAPTER_UNAVAILABLE, error="gone"))
        await reader.raises(NoCapacity, "acknowledges the adapter of one")
        await rig.ask(model="one").raises(NoCapacity, "acknowledges the adapter of one")


async def test_nodes_that_only_say_that_they_lack_it_are_not_asked_for_ever() -> None:
    async with adapters_of(D1) as adapters:
        rig = adapters.rig
        await adapters.load("one", A, "d1")
        reader = rig.ask(model="one")
        for _ in range(MAX_REFUSALS + 1):
            submit = await rig.next_submit("d1")
            rig.nodes["d1"].report(RequestDelta(submit.attempt, outcome=Outcome.ADAPTER_UNAVAILABLE, error="not here"))
        await reader.raises(AttemptsExhausted, "d1 refused: not here")


async def test_a_node_that_was_started_again_learns_of_adapters_and_serves_those_that_waited() -> None:
    async with adapters_of(D1) as adapters:
        rig = adapters.rig
        await adapters.load("one", A, "d1")
        reader = rig.ask(model="one")
        submit = await rig.next_submit("d1")
        rig.report("d1", submit.attempt, 0, "a")
        await rig.nodes["d1"].all_read()
        rig.nodes["d1"].die()
        await rig.wait_until_attached(0)
        again = replace(decode(run=2), capabilities=CAN)
        rig.register(again)
        await rig.wait_until_attached(1)
        assert await adapters.listed("d1") == {"one": A}
        newcomer = rig.ask(model="one")
        await asyncio.sleep(0)
        assert rig.nodes["d1"].inbox.empty(), "it has not acknowledged the adapter"
        adapters.acknowledge("d1", A)
        for _ in range(2):
            assert (await adapters.served("d1", "b")).spec.adapter == A
        await asyncio.gather(reader.finished(), newcomer.finished())


async def test_requests_without_the_adapter_do_not_wait_behind_one_whose_nodes_are_still_checking() -> None:
    async with adapters_of(D1) as adapters:
        rig = adapters.rig
        rig.card = replace(rig.card, adapters={"one": AdapterSource("one", "/one", A)})
        waiting = rig.ask(model="one")
        base = rig.ask()
        assert (await adapters.served("d1")).spec.adapter == ""
        await base.finished()
        adapters.acknowledge("d1", A)
        assert (await adapters.served("d1")).spec.adapter == A
        await waiting.finished()


# --- commands ---


async def test_nodes_that_find_other_bytes_are_named_with_both_digests() -> None:
    async with adapters_of(D1, D2) as adapters:
        adapters.rig.nodes["d1"].adapters["/one"] = info(A)
        adapters.rig.nodes["d2"].adapters["/one"] = info(B)
        with pytest.raises(AdapterRefused, match=f"d1 finds {A}, d2 finds {B}"):
            await adapters.cluster.load_adapter("one", "/one")
        assert not adapters.cluster.list_adapters()


async def test_an_adapter_that_one_node_refuses_is_served_by_the_others_with_a_warning() -> None:
    async with adapters_of(D1, D2) as adapters:
        adapters.rig.nodes["d1"].adapters["/one"] = info(A)
        loading = adapters.begin_loading("one", "/one")
        await adapters.listed("d1")
        adapters.acknowledge("d1", A)
        assert (await loading).warnings == ["d2: there is no directory /one"]
        with pytest.raises(AdapterRefused, match="d1: there is no directory /two"):
            await adapters.cluster.load_adapter("two", "/two")


async def test_a_name_is_given_again_only_on_purpose() -> None:
    async with adapters_of(D1) as adapters:
        await adapters.load("one", A, "d1")
        assert (await adapters.cluster.load_adapter("one", "/one")).unchanged
        adapters.rig.nodes["d1"].adapters["/one"] = info(B)
        with pytest.raises(InvalidRequest, match="has another adapter already"):
            await adapters.cluster.load_adapter("one", "/one")
        await adapters.load("one", B, "d1", replaces=True)
        assert adapters.rig.card.adapters["one"].digest == B
        with pytest.raises(UnknownModel):
            await adapters.cluster.unload_adapter("two")


@pytest.mark.parametrize(
    ("name", "directory", "message"),
    [
        ("", "/x", "lora_name"),
        ("a b", "/x", "lora_name"),
        ("x" * 200, "/x", "lora_name"),
        (MODEL, "/x", "is the base model"),
        ("one", "relative", "lora_path"),
        ("one", "/x\0", "lora_path"),
    ],
)
async def test_bad_names_and_directories_are_refused_before_any_node_is_asked(
    name: str, directory: str, message: str
) -> None:
    async with adapters_of() as adapters:
        with pytest.raises(InvalidRequest, match=message):
            await adapters.cluster.load_adapter(name, directory)


async def test_commands_are_bounded() -> None:
    async with adapters_of(D1) as adapters:
        adapters.rig.nodes["d1"].adapters["/one"] = info(A)
        loads = [adapters.begin_loading("one", "/one") for _ in range(1000)]
        await adapters.listed("d1")
        adapters.acknowledge("d1", A)
        results = await asyncio.gather(*loads, return_exceptions=True)
        assert sum(isinstance(one, Overloaded) for one in results) == 1000 - MAX_LOADING
        adapters.want(AdapterSource(f"n{number}", "/x", A) for number in range(MAX_ADAPTERS))
        with pytest.raises(InvalidRequest, match="as many as may"):
            await adapters.cluster.load_adapter("another", "/one")


async def test_of_two_loads_that_take_one_name_at_the_same_time_the_second_is_refused() -> None:
    async with adapters_of(D1) as adapters:
        adapters.rig.nodes["d1"].adapters |= {"/one": info(A), "/two": info(B)}
        loads = [adapters.begin_loading("x", place) for place in ("/one", "/two")]
        assert await adapters.listed("d1") == {"x": A}
        adapters.acknowledge("d1", A)
        first, second = await asyncio.gather(*loads, return_exceptions=True)
        assert not isinstance(first, BaseException)
        assert isinstance(second, InvalidRequest)
        assert "has another adapter already" in second.reason
        # The last name that is free can be taken once, too.
        adapters.want(AdapterSource(f"n{number}", "/x", A) for number in range(MAX_ADAPTERS - 2))
        loads = [adapters.begin_loading(name, "/one") for name in ("y", "z")]
        results = await asyncio.gather(*loads, return_exceptions=True)
        assert sum(isinstance(one, InvalidRequest) for one in results) == 1
        assert len(adapters.state.named_adapters) == MAX_ADAPTERS


async def test_nodes_that_find_an_adapter_and_do_not_acknowledge_it_are_named_in_the_answer() -> None:
    async with adapters_of(D1, D2) as adapters:
        for node in ("d1", "d2"):
            adapters.rig.nodes[node].adapters["/one"] = info(A)
        loading = adapters.begin_loading("one", "/one")
        await adapters.listed("d1")
        adapters.rig.nodes["d1"].report(adapters={A: "no memory"})
        await adapters.wait_for(loading, "d1", "d2")
        assert (await loading).warnings == ["d1: no memory", "d2: has not acknowledged it within 10 s"]


async def test_without_nodes_or_a_model_that_can_nothing_is_loaded() -> None:
    async with adapters_of() as adapters:
        with pytest.raises(NoCapacity):
            await adapters.cluster.load_adapter("one", "/one")
    async with adapters_of(replace(D1, capabilities=GENERATES)) as adapters:
        with pytest.raises(UnsupportedRequest, match="lora"):
            await adapters.cluster.load_adapter("one", "/one")


async def test_a_node_that_does_not_acknowledge_in_time_or_is_lost_holds_no_command_up() -> None:
    async with adapters_of(D1) as adapters:
        adapters.rig.nodes["d1"].adapters["/one"] = info(A)
        for lose in (False, True):
            loading = adapters.begin_loading("one", "/one")
            if not lose:
                await adapters.listed("d1")
            await adapters.wait_for(loading, *(() if lose else ("d1",)))
            assert (await loading).digest == A


async def test_adapters_that_a_router_was_started_with_get_their_names_once_nodes_are_there() -> None:
    async with router_rig() as rig:
        adapters = Adapters(rig)
        settled = asyncio.Event()
        modules = {"one": "/one", "bad": "/bad", "known": "/elsewhere"}
        adapters.want([AdapterSource("known", "/known", B)])
        running = asyncio.create_task(adapters.cluster.run(modules, 1, settled.set))
        rig.register(D1)
        rig.nodes["d1"].adapters["/one"] = info(A)
        await rig.wait_until_attached(1)
        assert await adapters.listed("d1") == {"known": B}
        assert await adapters.listed("d1") == {"known": B, "one": A}
        assert not settled.is_set()
        adapters.acknowledge("d1", A, B)
        await settled.wait()
        assert adapters.cluster.is_settled
        names = {name: source.directory for name, source in rig.card.adapters.items()}
        assert names == {"one": "/one", "known": "/known"}
        assert adapters.reasons() == ["AdapterLoaded", "AdapterRefused"]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
