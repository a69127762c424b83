"""The adapters of the cluster at one router: their names, which nodes acknowledge them, and operators' commands.

The names are in the registry, as all that operators want, so all routers have the same ones. Each router tells each of
its nodes all adapters that its requests may have, and places a request only on nodes that acknowledge its adapter. A
digest that has lost its name stays on that list while a request of this router has it, so that such a request can go on
at another node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from baton.errors import AdapterRefused, BatonError, InvalidRequest, NoCapacity, Overloaded, UnknownModel
from baton.messages.adapters import (
    MAX_ADAPTERS,
    MAX_LISTED,
    MAX_NAME_CHARS,
    AdapterList,
    AdapterRefusal,
    AdapterRow,
    AdapterSource,
    LoadedAdapter,
    is_adapter_directory,
    is_adapter_name,
)
from baton.messages.node import NodeDescription
from baton.messages.node_model import Capability, check_capable
from baton.model_formats.adapters import AdapterInfo
from baton.registry import DesiredChange, DesiredState
from baton.registry.desired import forget_adapter, name_adapter
from router.leg_messages import NodeSender
from router.live_requests import LiveRequests
from router.operations.cluster_events import EventRing
from router.placement.view import ClusterView
from router.timers import Timers, first_of, sleep_until

_log = logging.getLogger(__name__)

MAX_LOADING = 4
"""How many adapters operators may give names to at the same time, at one router."""
INSPECT_S = 60.0
"""How long a node may take to read an adapter."""
ACKNOWLEDGE_S = 10.0
"""How long a command waits for the nodes that have inspected an adapter to acknowledge it."""
CHECK_EVERY_S = 1.0
"""How often a router looks whether adapters without a name are still in use."""


class AdapterNode(Protocol):
    """Speaks to one node; `baton.wire.clients.node_client.NodeClient` is the real one."""

    async def inspect_adapter(
        self, directory: str, incarnation: str = "", timeout_s: float | None = None
    ) -> AdapterInfo: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Inspection:
    """What one node says of an adapter: one of the two."""

    node: NodeDescription
    info: AdapterInfo | None
    refusal: BatonError | None


class ClusterAdapters:
    """The adapters at one router. Belongs to the event loop."""

    def __init__(
        self,
        model: str,
        requests: LiveRequests,
        view: ClusterView,
        nodes: NodeSender,
        timers: Timers,
        events: EventRing,
        connect: Callable[[str], AdapterNode],
        write: Callable[[DesiredChange], Awaitable[None]],
        set_names: Callable[[Mapping[str, AdapterSource]], None],
    ) -> None:
        """`model`: the name of the base model. `write` changes what operators want. `set_names` takes the adapters that
        clients may name from now on.
        """
        self._model = model
        self._view = view
        self._nodes = nodes
        self._timers = timers
        self._events = events
        self._connect = connect
        self._write = write
        self._set_names = set_names
        self._in_use = requests.adapters_in_use
        self._desired = DesiredState()
        self._names: Mapping[str, AdapterSource] = {}
        self._listed: dict[str, AdapterSource] = {}
        """What nodes are told of, by digest."""
        self._num_loading = 0
        self._naming = asyncio.Lock()
        """Held from the last look at the names until a new one is written, so that two commands don't take one name."""
        self._changed = asyncio.Event()
        """Set when a node came, or said something of adapters; whoever sets it makes a new one."""
        self.is_settled = False
        """Whether the adapters that the router was started with are served, or were refused."""
        self._reported: set[tuple[str, str, str]] = set()
        """The refusals of nodes of which operators were told, with node and digest."""
        requests.on_node.add(self._on_node)
        requests.on_adapters.add(self._on_report)

    # --- following the cluster ---

    def take_desired(self, desired: DesiredState) -> None:
        """Take what operators want."""
        self._desired = desired
        names = {name: named.source for name, named in desired.named_adapters.items()}
        if names != self._names:
            self._names = names
            # The name of the base model always means the base model.
            self._set_names({name: source for name, source in names.items() if name != self._model})
        self.check()

    def check(self) -> None:
        """Tell nodes if the adapters have changed that requests may have; called regularly, too."""
        named = {source.digest: source for source in self._names.values()}
        lost = self._listed.keys() - named.keys()
        if lost:
            in_use = self._in_use()
            named |= {digest: self._listed[digest] for digest in lost if digest in in_use}
        listed = dict(list(named.items())[:MAX_LISTED])
        if listed != self._listed:
            self._listed = listed
            for node in self._view.descriptions():
                self._send_list(node.incarnation)

    def _on_node(self, incarnation: str) -> None:
        """A node is attached."""
        if self._listed:
            self._send_list(incarnation)
        self._note_change()

    def _on_report(self, incarnation: str) -> None:
        """A node has said which adapters it acknowledges; the view has the report already."""
        refusals = set(self._view.adapter_refusals())
        for node, digest, reason in refusals - self._reported:
            source = self._listed.get(digest)
            name = source.name if source is not None else digest[:12]
            self._events.record("AdapterRefused", node, detail=f"{name}: {reason}", is_warning=True)
        self._reported = refusals
        self._note_change()

    def _send_list(self, incarnation: str) -> None:
        self._nodes.send(incarnation, AdapterList(tuple(self._listed.values())))

    # --- commands ---

    async def load_adapter(self, name: str, directory: str, *, replaces: bool = False) -> LoadedAdapter:
        """Give a name to the adapter in a directory of the nodes. `replaces`: it may have another adapter already.

        Raises InvalidRequest for a bad name or directory, or for a name that is taken; AdapterRefused if no node takes
        the adapter, or nodes find different ones there; UnsupportedRequest if the model takes none; NoCapacity without
        nodes; Overloaded when too many are loaded at the same time; Unreachable if the registry can't store it.
        """
        self._check_name(name, directory)
        if self._num_loading >= MAX_LOADING:
            raise Overloaded(f"{MAX_LOADING} adapters are being loaded, as many as may at a time: try again")
        self._num_loading += 1
        try:
            return await self._load(name, directory, replaces)
        finally:
            self._num_loading -= 1

    async def unload_adapter(self, name: str) -> None:
        """Take the name away: new requests with it are refused, running ones end with their adapter.

        Raises UnknownModel if no adapter has this name; Unreachable if the registry can't store it.
        """
        if name not in self._names:
            raise UnknownModel("lora_name", f"no adapter has the name {name[:MAX_NAME_CHARS]!r}")
        await self._write(forget_adapter(name, self._desired))
        self._events.record("AdapterUnloaded", detail=name)

    def list_adapters(self) -> Sequence[AdapterRow]:
        """All adapters by name, and what nodes say of them."""
        refusals: dict[str, list[AdapterRefusal]] = {}
        for node, digest, reason in self._view.adapter_refusals():
            refusals.setdefault(digest, []).append(AdapterRefusal(node, reason))
        return [
            AdapterRow(
                name,
                source.digest,
                source.directory,
                sorted(self._view.acknowledging(source.digest)),
                sorted(refusals.get(source.digest, ()), key=lambda refusal: refusal.node),
            )
            for name, source in self._names.items()
        ]

    async def run(self, modules: Mapping[str, str], num_nodes: int, on_settled: Callable[[], None]) -> None:
        """Give names to the adapters that the router was started with, then keep nodes' lists short, until cancelled.

        Begins when `num_nodes` nodes are attached, at least one if there are adapters. A name that the registry has
        keeps its adapter. An adapter that is refused is logged, and has no name.
        """
        while modules and self._view.num_attached < max(1, num_nodes):
            await self._next_change(self._timers.monotonic() + CHECK_EVERY_S)
        for name, directory in modules.items():
            await self._name_from_start(name, directory)
        self.is_settled = True
        on_settled()
        while True:
            await sleep_until(self._timers, self._timers.monotonic() + CHECK_EVERY_S)
            self.check()

    async def _name_from_start(self, name: str, directory: str) -> None:
        while True:
            known = self._names.get(name)
            if known is not None:
                if known.directory != directory:
                    _log.warning("adapter %s is %s, as operators want, and not %s", name, known.directory, directory)
                await self._acknowledged(known.digest, {node.incarnation for node in self._view.descriptions()})
                return
            try:
                await self.load_adapter(name, directory)
            except BatonError as error:
                if error.retryable:
                    _log.info("adapter %s is loaded later: %s", name, error)
                    await sleep_until(self._timers, self._timers.monotonic() + CHECK_EVERY_S)
                    continue
                _log.error("adapter %s is not served: %s", name, error)
                self._events.record("AdapterRefused", detail=f"{name}: {error}", is_warning=True)
                return

    # --- internals ---

    def _check_name(self, name: str, directory: str) -> None:
        if not is_adapter_name(name):
            most = MAX_NAME_CHARS
            raise InvalidRequest("lora_name", f"must be up to {most} letters, digits and _ . : / -, not {name[:80]!r}")
        if name == self._model:
            raise InvalidRequest("lora_name", f"{name!r} is the base model, and can't be an adapter")
        if not is_adapter_directory(directory):
            raise InvalidRequest("lora_path", f"must be an absolute path on the nodes, not {directory[:80]!r}")
        self._check_room(name)

    def _check_room(self, name: str) -> None:
        if name not in self._names and len(self._names) >= MAX_ADAPTERS:
            raise InvalidRequest("lora_name", f"{MAX_ADAPTERS} adapters have names, as many as may: unload one")

    async def _load(self, name: str, directory: str, replaces: bool) -> LoadedAdapter:
        nodes = [node for node in self._view.descriptions() if node.model == self._model]
        if not nodes:
            raise NoCapacity(f"no node that serves {self._model} is up")
        check_capable(self._model, {Capability.LORA}, frozenset().union(*(node.can for node in nodes)))
        inspections = await asyncio.gather(*(self._inspect(node, directory) for node in nodes))
        info = _agreed(directory, inspections)
        async with self._naming:
            is_new = await self._give_name(AdapterSource(name, directory, info.digest), replaces)
        loaded = {reply.node.incarnation: reply.node.node_id for reply in inspections if reply.info is not None}
        await self._acknowledged(info.digest, loaded.keys())
        warnings = [f"{reply.node.node_id}: {reply.refusal}" for reply in inspections if reply.refusal is not None]
        warnings += self._unacknowledged(info.digest, loaded.values())
        return LoadedAdapter(info.digest, info.rank, info.num_bytes, unchanged=not is_new, warnings=warnings)

    async def _give_name(self, source: AdapterSource, replaces: bool) -> bool:
        """Write the name of an adapter, unless it has it already; returns whether it was written."""
        name = source.name
        self._check_room(name)
        known = self._names.get(name)
        if known is not None and known.digest != source.digest and not replaces:
            raise InvalidRequest(
                "lora_name",
                f"{name!r} has another adapter already ({known.digest:.12} in {known.directory}): unload it first, or "
                "replace it with load_inplace (baton lora load --replace)",
            )
        if known == source:
            return False
        await self._write(name_adapter(source, self._desired))
        self._events.record("AdapterLoaded", detail=f"{name}: {source.digest:.12} in {source.directory}")
        return True

    def _unacknowledged(self, digest: str, nodes: Iterable[str]) -> Sequence[str]:
        """For each of these nodes that doesn't acknowledge the adapter: its name, and why."""
        acknowledging = self._view.acknowledging(digest)
        reasons = {node: reason for node, refused, reason in self._view.adapter_refusals() if refused == digest}
        late = f"has not acknowledged it within {ACKNOWLEDGE_S:g} s"
        return [f"{node}: {reasons.get(node, late)}" for node in nodes if node not in acknowledging]

    async def _inspect(self, node: NodeDescription, directory: str) -> _Inspection:
        client = self._connect(node.address)
        try:
            return _Inspection(node, await client.inspect_adapter(directory, node.incarnation, INSPECT_S), None)
        except BatonError as error:
            return _Inspection(node, None, error)
        finally:
            await client.close()

    async def _acknowledged(self, digest: str, incarnations: Set[str]) -> None:
        """Wait until these nodes have acknowledged the adapter, or refused it, or are gone; at most ACKNOWLEDGE_S."""
        until = self._timers.monotonic() + ACKNOWLEDGE_S
        while self._view.awaits_answer(digest, incarnations) and (now := self._timers.monotonic()) < until:
            # A node that is lost answers no more, and nothing tells of that here.
            await self._next_change(min(until, now + CHECK_EVERY_S))

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _next_change(self, until: float) -> None:
        """Wait until a node came or said something of adapters, at most until then."""
        await first_of(self._changed.wait(), sleep_until(self._timers, until))


def _agreed(directory: str, inspections: Sequence[_Inspection]) -> AdapterInfo:
    """What the nodes that take the adapter say of it. Raises AdapterRefused if none takes it or they disagree."""
    infos = [(reply.node.node_id, reply.info) for reply in inspections if reply.info is not None]
    if not infos:
        refusals = [reply for reply in inspections if reply.refusal is not None]
        first = next((reply for reply in refusals if isinstance(reply.refusal, AdapterRefused)), refusals[0])
        assert first.refusal is not None
        if isinstance(first.refusal, AdapterRefused):
            raise AdapterRefused(f"{first.node.node_id}: {first.refusal}")
        raise first.refusal.not_raised()
    (node_id, info), *others = infos
    for another, other_info in others:
        if other_info.digest != info.digest:
            raise AdapterRefused(
                f"{directory} holds different adapters: {node_id} finds {info.digest}, {another} finds "
                f"{other_info.digest}; copy the same files to all nodes"
            )
    return info
