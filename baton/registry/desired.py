"""The desired state of a cluster: which nodes get no new requests, the role of each, and the names of adapters.

The desired state outlives nodes and routers. The registry keeps it, and the watchers write it back to a registry that
has lost its data. A name without a node is not an error, because the node may be down at the moment."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from baton.messages.adapters import MAX_DIRECTORY_BYTES, MAX_LISTED, AdapterSource
from baton.values import value

_MOST_CHARS = MAX_DIRECTORY_BYTES + 1024
_FIELDS = {"name", "directory", "digest", "number"}
DesiredSet: TypeAlias = Literal[
    "cordoned", "prefill", "decode", "adapters", "planned_cordon", "planned_prefill", "planned_decode"
]
DESIRED_SETS: tuple[DesiredSet, ...] = get_args(DesiredSet)
"""The names of the sets of texts that make up the desired state. The first three have names of nodes, two of them are
roles: a node is in at most one of these. The fourth has adapters, see `NamedAdapter`. The others are the planner's, and
count only where operators have said nothing.
"""
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}\Z")


@value(frozen=True, slots=True)
class NamedAdapter:
    """An adapter under the name by which clients ask for it."""

    source: AdapterSource
    number: int = 1
    """Larger than those of the adapters that had the name before: of two that have it, the one with the larger number
    does. Two routers may have given the name at the same time."""

    @property
    def text(self) -> str:
        """The adapter as it is stored: equal adapters have equal texts."""
        source = self.source
        fields = {"name": source.name, "directory": source.directory, "digest": source.digest, "number": self.number}
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> NamedAdapter | None:
        """The adapter in a stored text; None if Baton has not written it."""
        if len(text) > _MOST_CHARS:
            return None
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(fields, dict) or fields.keys() != _FIELDS:
            return None
        number = fields.pop("number")
        if not all(isinstance(part, str) for part in fields.values()) or type(number) is not int or number < 1:
            return None
        named = cls(AdapterSource(**fields), number)
        return named if named.source.is_sound and named.text == text else None


def named_adapters(texts: Iterable[str]) -> Mapping[str, NamedAdapter]:
    """The adapter of each name, in the order of the names; at most MAX_LISTED.

    Routers give no more than MAX_ADAPTERS names. Two that give one at the same time may exceed that: these are served.
    """
    by_name: dict[str, NamedAdapter] = {}
    for text in texts:
        named = NamedAdapter.parse(text)
        if named is None:
            continue
        known = by_name.get(named.source.name)
        if known is None or (named.number, named.text) > (known.number, known.text):
            by_name[named.source.name] = named
    return {name: by_name[name] for name in sorted(by_name)[:MAX_LISTED]}


def texts_of(name: str, texts: Iterable[str]) -> Sequence[str]:
    """The stored texts of all adapters that have this name."""
    return [text for text in texts if (named := NamedAdapter.parse(text)) is not None and named.source.name == name]


@dataclass(frozen=True, slots=True)
class DesiredState:
    """The desired state of one cluster: a set of texts for each of DESIRED_SETS."""

    cordoned: frozenset[str] = frozenset()
    prefill: frozenset[str] = frozenset()
    decode: frozenset[str] = frozenset()
    adapters: frozenset[str] = frozenset()
    planned_cordon: frozenset[str] = frozenset()
    """Nodes that are about to take another role."""
    planned_prefill: frozenset[str] = frozenset()
    planned_decode: frozenset[str] = frozenset()

    @classmethod
    def of(cls, stored: Mapping[str, Iterable[str]]) -> DesiredState:
        """Make the state from the registry's sets, without entries that are no valid node names or adapters."""
        names = {kind: frozenset(filter(_is_valid(kind), stored.get(kind, ()))) for kind in DESIRED_SETS}
        return cls(**names)

    @property
    def named_adapters(self) -> Mapping[str, NamedAdapter]:
        """The adapter of each name, in the order of the names."""
        return named_adapters(self.adapters)

    def names(self, kind: DesiredSet) -> frozenset[str]:
        """The texts in one of the sets."""
        names: frozenset[str] = getattr(self, kind)
        return names

    def is_cordoned(self, name: str) -> bool:
        """Whether the node is to get no new requests."""
        return name in self.cordoned or name in self.planned_cordon

    def role_of(self, name: str) -> Literal["prefill", "decode"] | None:
        """The role that the node is to have. None: the role that it was started with."""
        if name in self.prefill or name in self.decode:
            return "prefill" if name in self.prefill else "decode"
        if name in self.planned_prefill:
            return "prefill"
        return "decode" if name in self.planned_decode else None


@dataclass(frozen=True, slots=True)
class DesiredChange:
    """Texts to add to the sets and texts to remove from them, in one step. Applying it twice has no further effect."""

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
    """The change after which these nodes get requests again, whoever has cordoned them."""
    gone = frozenset(names)
    return DesiredChange({}, {"cordoned": gone, "planned_cordon": gone})


def set_role(name: str, role: Literal["prefill", "decode"]) -> DesiredChange:
    """The change after which the node has this role, now and after each start, whatever is planned for it."""
    opposite: DesiredSet = "decode" if role == "prefill" else "prefill"
    one = frozenset({name})
    return DesiredChange({role: one}, {opposite: one, "planned_prefill": one, "planned_decode": one})


def plan_cordon(name: str) -> DesiredChange:
    """The change after which the node gets no new requests while it moves."""
    return DesiredChange({"planned_cordon": frozenset({name})}, {})


def end_planned_cordons(names: Iterable[str]) -> DesiredChange:
    """The change after which these nodes get requests again, unless operators have cordoned them."""
    return DesiredChange({}, {"planned_cordon": frozenset(names)})


def plan_role(name: str, role: Literal["prefill", "decode"]) -> DesiredChange:
    """The change after which the node has this role, now and after each start, unless operators have given it one."""
    one = frozenset({name})
    if role == "prefill":
        return DesiredChange({"planned_prefill": one}, {"planned_decode": one})
    return DesiredChange({"planned_decode": one}, {"planned_prefill": one})


def forget_planned(names: Iterable[str]) -> DesiredChange:
    """The change after which nothing is planned for these nodes."""
    gone = frozenset(names)
    return DesiredChange({}, {"planned_cordon": gone, "planned_prefill": gone, "planned_decode": gone})


def name_adapter(source: AdapterSource, state: DesiredState) -> DesiredChange:
    """The change after which this adapter has its name, in place of those that have it in `state`."""
    before = texts_of(source.name, state.adapters)
    known = named_adapters(before).get(source.name)
    named = NamedAdapter(source, known.number + 1 if known is not None else 1)
    return DesiredChange({"adapters": frozenset({named.text})}, {"adapters": frozenset(before)})


def forget_adapter(name: str, state: DesiredState) -> DesiredChange:
    """The change after which no adapter has this name."""
    return DesiredChange({}, {"adapters": frozenset(texts_of(name, state.adapters))})


def _is_valid(kind: DesiredSet) -> Callable[[str], object]:
    return NamedAdapter.parse if kind == "adapters" else _NAME.match


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
            chosen, planned = fresh.prefill | fresh.decode, fresh.planned_prefill | fresh.planned_decode
            named = fresh.named_adapters
            known = replace(
                self._known,
                prefill=self._known.prefill - chosen,
                decode=self._known.decode - chosen,
                planned_prefill=self._known.planned_prefill - planned,
                planned_decode=self._known.planned_decode - planned,
                # Whoever planned a move begins it anew, or nobody would ever end its cordon.
                planned_cordon=frozenset(),
                adapters=frozenset(
                    adapter.text for name, adapter in self._known.named_adapters.items() if name not in named
                ),
            )
            lost = {kind: missing for kind in DESIRED_SETS if (missing := known.names(kind) - fresh.names(kind))}
        self._epoch = epoch
        again = DesiredChange(lost, {})
        self._known = again.applied_to(fresh)
        return self._known, again
