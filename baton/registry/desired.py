"""The desired state of nodes, by name: which get no new requests, and which role each is to have.

The desired state outlives nodes and routers. The registry keeps it, and the watchers write it back to a registry that
has lost its data. A name without a node is not an error, because the node may be down at the moment.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

DesiredSet: TypeAlias = Literal["cordoned", "prefill", "decode"]
DESIRED_SETS: tuple[DesiredSet, ...] = get_args(DesiredSet)
"""The names of the sets of nodes that make up the desired state. The last two are roles: a node is in at most one of
them."""

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}\Z")


@dataclass(frozen=True, slots=True)
class DesiredState:
    """The desired state of one cluster: a set of nodes, by name, for each of DESIRED_SETS."""

    cordoned: frozenset[str] = frozenset()
    prefill: frozenset[str] = frozenset()
    decode: frozenset[str] = frozenset()

    @classmethod
    def of(cls, stored: Mapping[str, Iterable[str]]) -> DesiredState:
        """Make the state from the registry's sets, without entries that are no valid node names."""
        found = {kind: frozenset(filter(_NAME.match, stored.get(kind, ()))) for kind in DESIRED_SETS}
        return cls(**found)

    def names(self, kind: DesiredSet) -> frozenset[str]:
        """The names in one of the sets."""
        found: frozenset[str] = getattr(self, kind)
        return found

    def role_of(self, name: str) -> Literal["prefill", "decode"] | None:
        """The role that the node is to have. None: the role that it was started with."""
        if name in self.prefill:
            return "prefill"
        return "decode" if name in self.decode else None


@dataclass(frozen=True, slots=True)
class DesiredChange:
    """Names to add to the sets and names to remove from them, in one step. Applying it twice has no further effect."""

    add: Mapping[DesiredSet, frozenset[str]]
    remove: Mapping[DesiredSet, frozenset[str]]

    @property
    def is_empty(self) -> bool:
        return not any(self.add.values()) and not any(self.remove.values())

    def applied_to(self, state: DesiredState) -> DesiredState:
        """The desired state after this change."""
        sets = {
            kind: (state.names(kind) - self.remove.get(kind, frozenset())) | self.add.get(kind, frozenset())
            for kind in DESIRED_SETS
        }
        return replace(state, **sets)


def cordon(names: Iterable[str]) -> DesiredChange:
    """The change after which these nodes get no new requests."""
    return DesiredChange({"cordoned": frozenset(names)}, {})


def uncordon(names: Iterable[str]) -> DesiredChange:
    """The change after which these nodes get requests again."""
    return DesiredChange({}, {"cordoned": frozenset(names)})


def set_role(name: str, role: Literal["prefill", "decode"]) -> DesiredChange:
    """The change after which the node has this role, now and after each start."""
    other: DesiredSet = "decode" if role == "prefill" else "prefill"
    return DesiredChange({role: frozenset({name})}, {other: frozenset({name})})


class DesiredMemory:
    """A watcher's copy of the desired state, from which a registry that lost its data is restored. Does no I/O."""

    def __init__(self) -> None:
        self._epoch: str | None = None
        self._known = DesiredState()

    def merge(self, epoch: str | None, fresh: DesiredState) -> tuple[DesiredState, DesiredChange]:
        """The state that holds now, and the change that restores it in the registry.

        `epoch`: as for `OutageGrace.merge`; a different one means that the registry has lost its data.
        """
        lost: dict[DesiredSet, frozenset[str]] = {}
        if self._epoch is not None and epoch != self._epoch:
            # A role that an operator has set since then replaces the remembered one.
            chosen = fresh.prefill | fresh.decode
            known = replace(self._known, prefill=self._known.prefill - chosen, decode=self._known.decode - chosen)
            lost = {kind: missing for kind in DESIRED_SETS if (missing := known.names(kind) - fresh.names(kind))}
        self._epoch = epoch
        again = DesiredChange(lost, {})
        self._known = again.applied_to(fresh)
        return self._known, again
