"""Steering: carries out operators' commands at this router (cordon, drain, roles), and records events for operators.

Desired state is written to the registry before anything else happens, so that it outlives this router. Every router
reads it there and asks nodes for the role that they are to have; asking twice does no harm.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from baton.background import OnFault, start_background
from baton.did_you_mean import did_you_mean
from baton.errors import BatonError, CacheInUse, InvalidRequest, NodeNotFound, Unreachable
from baton.messages.node import Role
from baton.messages.operator import ClusterEvent, DrainProgress, NodeStatus, RoleSet
from baton.node.leftovers import GIVE_UP_AFTER_S
from baton.registry import DesiredChange, DesiredState, Membership
from baton.registry.base import Term
from baton.registry.desired import cordon, set_role, uncordon
from router.listeners import Listeners
from router.operations.cluster_events import ClusterSnapshot, EventRing, NodeSnapshot, cluster_changes
from router.placement.placement import Candidate, may_serve, note_of_left_out
from router.placement.placer import Placer
from router.placement.view import ClusterView
from router.timers import Timers, first_of, sleep_until

_log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
SETTLE_S = 3.0
"""Other routers read the desired state at least so often; until then they may still send a cordoned node work."""
_TELL_EVERY_S = 0.2
_ANSWER_S = 5.0


class SteeredNode(Protocol):
    """Speaks to one address; `baton.wire.clients.node_client.NodeClient` is the real one."""

    async def set_role(self, role: Role, incarnation: str = "", timeout_s: float | None = None) -> None: ...

    async def drain(self, timeout_s: float | None = None) -> None: ...

    async def reset_prefix_cache(self, incarnation: str = "", timeout_s: float | None = None) -> int: ...

    async def close(self) -> None: ...


class Steering:
    """The commands of operators at one router. Belongs to the event loop."""

    def __init__(
        self,
        view: ClusterView,
        membership: Membership,
        placer: Placer,
        timers: Timers,
        events: EventRing,
        connect: Callable[[str], SteeredNode],
        model_name: str,
    ) -> None:
        self._view = view
        self._membership = membership
        self._placer = placer
        self._timers = timers
        self._events = events
        self._connect = connect
        self._model_name = model_name
        self._desired = DesiredState()
        self._routers: dict[str, str] = {}
        self._snapshot = ClusterSnapshot()
        self._asked: dict[str, str] = {}
        """The role that each incarnation was asked to take."""
        self._refusals: dict[str, str] = {}
        """The latest error of asking each incarnation, of which operators were told."""
        self._asking: set[asyncio.Task[None]] = set()
        self._work_changed = asyncio.Event()
        self.on_desired: Listeners[DesiredState] = Listeners()
        """Called with what operators want, at first and after each change."""
        view.on_cordoned_work.add(self._on_cordoned_work)

    # --- following the cluster ---

    async def watch(self) -> None:
        """Follow the desired state in the registry, until cancelled."""
        async for desired in self._membership.watch_desired():
            self._take_desired(desired)

    async def check_periodically(self) -> None:
        """Check the cluster regularly, for changes of which no message tells, until cancelled."""
        while True:
            self.check_cluster()
            await sleep_until(self._timers, self._timers.monotonic() + CHECK_INTERVAL_S)

    def registered_routers(self, routers: dict[str, str]) -> None:
        """Take the routers that are in the registry now: names by incarnation."""
        self._routers = routers

    def check_cluster(self) -> None:
        """Record what has changed in the cluster since the last check, and ask nodes for their desired roles."""
        try:
            self._ask_for_roles()
            before, self._snapshot = self._snapshot, self._take_snapshot()
            for change in cluster_changes(before, self._snapshot):
                self._events.record(
                    change.reason,
                    change.subject,
                    incarnation=change.incarnation,
                    detail=change.detail,
                    is_warning=change.is_warning,
                )
        except Exception:
            # Requests are served, whether or not operators are told of changes.
            _log.exception("checking the cluster for changes failed; the next check tries again")

    async def close(self) -> None:
        """Stop asking nodes."""
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)

    # --- commands ---

    async def cordon(self, names: Sequence[str]) -> str:
        """Send these nodes no new requests. Returns why the cluster can serve less from now on, or an empty text.

        Raises NodeNotFound, InvalidRequest, or Unreachable if the registry does not answer: then nothing changes.
        """
        self._check_names(names, self._nodes())
        await self.write(cordon(names))
        return self._why_serves_less()

    async def uncordon(self, names: Sequence[str]) -> None:
        """Send these nodes requests again; raises as `cordon`."""
        # A node that is away can be uncordoned, too.
        self._check_names(
            names, {**self._nodes(), **dict.fromkeys(self._desired.cordoned | self._desired.planned_cordon)}
        )
        await self.write(uncordon(names))

    async def set_role(self, name: str, role: str) -> RoleSet:
        """Let a node take a role as soon as its work is done; raises as `cordon`."""
        nodes = self._nodes()
        self._check_names([name], nodes)
        if role == "prefill":
            change = set_role(name, "prefill")
        elif role == "decode":
            change = set_role(name, "decode")
        else:
            raise InvalidRequest("role", f"{role[:40]!r} is none of prefill, decode")
        status, wanted = nodes[name], self._desired.role_of(name)
        if status.role == "encode":
            raise InvalidRequest("nodes", f"{name} has its model's encoder alone, and stays an encode node")
        if status.role == role and wanted in (None, role):
            return RoleSet(unchanged=True)
        await self.write(change)
        return RoleSet(warning=self._why_serves_less_without(name, role))

    async def drain(self, name: str, stop: bool) -> AsyncIterator[DrainProgress]:
        """Cordon a node, and report how much work it has left until it has none; `stop`: then end its process.

        Blocks in quarantine wait for reads that may never end: when a node has had nothing else for GIVE_UP_AFTER_S, it
        counts as idle, and an event says so. Raises as `cordon`, and BatonError if the node is uncordoned meanwhile;
        otherwise it stays cordoned.
        """
        await self.cordon([name])
        settled_at = self._timers.monotonic() + self.settle_s
        last_progress: DrainProgress | None = None
        stopping = ""
        reads_only_since: float | None = None
        while True:
            changed = self._work_changed
            if name not in self._desired.cordoned:
                raise BatonError(f"{name} takes requests again: somebody has uncordoned it meanwhile")
            status = self._nodes().get(name)
            now = self._timers.monotonic()
            reads_only_since = (reads_only_since or now) if status is not None and _has_reads_only(status) else None
            give_up_at = reads_only_since + GIVE_UP_AFTER_S if reads_only_since is not None else None
            gives_up = give_up_at is not None and now >= give_up_at
            progress = _progress(status, is_settled=now >= settled_at, stopping=stopping, gives_up=gives_up)
            if progress.idle and progress.quarantined_blocks and status is not None and progress != last_progress:
                blocks = f"{progress.quarantined_blocks} blocks in quarantine, whose reads do not end"
                self._events.record("DrainGaveUp", name, incarnation=status.incarnation, detail=blocks)
            if progress != last_progress:
                last_progress = progress
                yield progress
            if progress.stopped or (progress.idle and not stop):
                return
            if progress.idle and not stopping and status is not None:
                stopping = status.incarnation
                await self._stop(status)
            await self._wait_for_work(changed, [settled_at] if give_up_at is None else [settled_at, give_up_at])

    async def reset_cache(self, name: str) -> int:
        """Let a node forget its prefix cache; returns how many blocks it had.

        Raises NodeNotFound, InvalidRequest for a router, CacheInUse while its blocks are in use, Unreachable.
        """
        nodes = self._nodes()
        self._check_names([name], nodes)
        status = nodes[name]
        client = self._connect(status.address)
        try:
            num_blocks = await client.reset_prefix_cache(status.incarnation, _ANSWER_S)
        except CacheInUse as error:
            raise CacheInUse(f"{name}: {error}") from None
        finally:
            await client.close()
        self._events.record("CacheReset", name, incarnation=status.incarnation, detail=f"{num_blocks} blocks forgotten")
        return num_blocks

    def events(self, after: int, follow: bool) -> AsyncIterator[ClusterEvent]:
        """The events with a larger number than `after`; `follow`: and then those that are still to come."""
        return self._events.follow(after) if follow else _all_of(self._events.after(after))

    # --- internals ---

    def _take_desired(self, desired: DesiredState) -> None:
        self._desired = desired
        self._view.desired(desired)
        self.on_desired(desired)
        # A drain that waits for a node to be idle must end if the node was uncordoned.
        self._on_cordoned_work()
        self.check_cluster()

    @property
    def desired(self) -> DesiredState:
        """What operators and the planner want, as of the last message of the registry."""
        return self._desired

    @property
    def settle_s(self) -> float:
        """Within so many seconds all routers know of a change of the desired state."""
        return SETTLE_S if len(self._routers) > 1 else 0.0

    async def write(self, change: DesiredChange, term: Term | None = None) -> None:
        """Change what is wanted, in the registry and here. Raises Unreachable if the registry can't store it.

        `term`: that of the router that plans moves; raises NotLeader if it has ended.
        """
        try:
            await self._membership.want(change, term)
        except Unreachable as error:
            raise Unreachable(f"nothing was changed, since the registry could not store it: {error}") from None
        self._take_desired(change.applied_to(self._desired))

    def _nodes(self) -> dict[str, NodeStatus]:
        """The nodes by name; of several incarnations the one that serves, or else the latest."""
        nodes: dict[str, NodeStatus] = {}
        for status in self._view.statuses(self._timers.monotonic(), 0.0):
            if status.name not in nodes or status.status not in ("Suspect", "Lost"):
                nodes[status.name] = status
        return nodes

    def _check_names(self, names: Sequence[str], known: dict[str, NodeStatus] | dict[str, NodeStatus | None]) -> None:
        if not names:
            raise InvalidRequest("nodes", "is empty")
        for name in names:
            if name in self._routers.values():
                raise InvalidRequest("nodes", f"{name} is a router, which drains when it is stopped (SIGTERM)")
            if name not in known:
                raise NodeNotFound(f"no node is called {name[:80]}{did_you_mean(name, known)}")

    def _why_serves_less(self) -> str:
        """What the cluster can't do any more in its present state; empty: nothing is missing."""
        candidates = self._view.candidates()
        if why := self._placer.why_not_ready(candidates, self._model_name):
            return f"nothing is served from now on: {why}"
        return _missing({candidate.node.role for candidate in may_serve(candidates, None)}, candidates)

    def _why_serves_less_without(self, name: str, role: str) -> str:
        candidates = [candidate for candidate in self._view.candidates() if candidate.node.node_id != name]
        return _missing({candidate.node.role for candidate in may_serve(candidates, None)} | {Role(role)}, candidates)

    def _ask_for_roles(self) -> None:
        nodes = self._view.descriptions()
        current = {node.incarnation for node in nodes}
        for memory in (self._asked, self._refusals):
            for incarnation in [known for known in memory if known not in current]:
                del memory[incarnation]
        for node in nodes:
            wanted = self._desired.role_of(node.node_id)
            if wanted is not None and self._asked.get(node.incarnation, node.role.value) != wanted:
                self._asked[node.incarnation] = wanted
                self._start_asking(
                    partial(self._ask_for_role, node.node_id, node.address, node.incarnation, Role(wanted))
                )

    async def _ask_for_role(self, name: str, address: str, incarnation: str, role: Role) -> None:
        client = self._connect(address)
        try:
            await client.set_role(role, incarnation, _ANSWER_S)
        except Exception as error:
            # The next check asks again.
            self._asked.pop(incarnation, None)
            if not isinstance(error, BatonError):
                raise
            if self._refusals.get(incarnation) != str(error):
                self._refusals[incarnation] = str(error)
                self._events.record(
                    "RoleRefused", name, incarnation=incarnation, detail=f"{role.value}: {error}", is_warning=True
                )
        finally:
            await client.close()

    def _start_asking(self, asking: Callable[[], Coroutine[None, None, None]]) -> None:
        task = start_background(asking, "set-role", on_fault=OnFault.GO_ON, may_end=True)
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _stop(self, status: NodeStatus) -> None:
        client = self._connect(status.address)
        try:
            await client.drain(_ANSWER_S)
        finally:
            await client.close()

    def _on_cordoned_work(self) -> None:
        self._work_changed.set()
        self._work_changed = asyncio.Event()

    async def _wait_for_work(self, changed: asyncio.Event, moments: Sequence[float]) -> None:
        """Wait until the work of a cordoned node has changed, or for one of these moments; at least _TELL_EVERY_S."""
        now = self._timers.monotonic()
        await first_of(changed.wait(), *(sleep_until(self._timers, moment) for moment in moments if now < moment))
        await sleep_until(self._timers, now + _TELL_EVERY_S)

    def _take_snapshot(self) -> ClusterSnapshot:
        now = self._timers.monotonic()
        why_unserved = self._placer.why_not_ready(self._view.candidates(), self._model_name)
        return ClusterSnapshot(
            nodes={incarnation: NodeSnapshot(*snapshot) for incarnation, snapshot in self._view.node_snapshots()},
            routers=self._routers,
            desired=self._desired,
            open_breakers=self._placer.open_breakers(now),
            registry_answers=self._membership.healthy,
            why_unserved=why_unserved,
            has_served=self._snapshot.has_served or not why_unserved,
        )


def _has_reads_only(status: NodeStatus) -> bool:
    """Whether nothing but blocks in quarantine keeps a node from being idle."""
    return bool(status.quarantined_blocks) and replace(status, quarantined_blocks=0).is_idle


def _progress(status: NodeStatus | None, *, is_settled: bool, stopping: str, gives_up: bool) -> DrainProgress:
    """How much work a node has left. `stopping`: the incarnation that was told to end, if one was.

    `gives_up`: whether it counts as idle with blocks in quarantine.
    """
    is_there = status is not None and status.status not in ("Suspect", "Lost")
    if status is None or not is_there or (stopping and status.incarnation != stopping):
        # Nothing runs on a node that is gone; its requests continue elsewhere.
        return DrainProgress(idle=True, stopped=True)
    return DrainProgress(
        running=status.running,
        waiting=status.waiting,
        leased_blocks=status.leased_blocks,
        quarantined_blocks=status.quarantined_blocks,
        in_flight=status.in_flight,
        idle=(status.is_idle or gives_up) and is_settled,
    )


def _missing(roles: set[Role], candidates: Sequence[Candidate]) -> str:
    for role in (Role.PREFILL, Role.DECODE):
        if role not in roles:
            return f"no {role.value} node is left for new requests{note_of_left_out(candidates, role)}"
    return ""


async def _all_of(events: Sequence[ClusterEvent]) -> AsyncIterator[ClusterEvent]:
    for event in events:
        yield event
