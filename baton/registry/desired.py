"""What operators want of nodes, by name: who gets no new requests, and which role a node is to have.

It outlives nodes and routers: the registry keeps it, and a registry that comes back empty gets it again from whoever
watched it. A name that no node has is no error: the node may only be away.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

Word: TypeAlias = Literal["cordoned", "prefill", "decode"]
WORDS: tuple[Word, ...] = get_args(Word)
"""Each is a set of names. The last two are roles; a name is in one of them at most."""

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}\Z")


@dataclass(frozen=True, slots=True)
class DesiredState:
    """Everything that operators want of one cluster."""

    cordoned: frozenset[str] = frozenset()
    prefill: frozenset[str] = frozenset()
    decode: frozenset[str] = frozenset()

    @classmethod
    def of(cls, stored: Mapping[str, Iterable[str]]) -> DesiredState:
        """From the registry's sets; what can't be a node's name is skipped."""
        found = {word: frozenset(filter(_NAME.match, stored.get(word, ()))) for word in WORDS}
        return cls(**found)

    def names(self, word: Word) -> frozenset[str]:
        """Those of which this is wanted."""
        found: frozenset[str] = getattr(self, word)
        return found

    def role_of(self, name: str) -> Literal["prefill", "decode"] | None:
        """The role that the node is to have; None: the one that it was started with."""
        if name in self.prefill:
            return "prefill"
        return "decode" if name in self.decode else None


@dataclass(frozen=True, slots=True)
class DesiredChange:
    """Names to add to sets and to take out of sets, all at once. Doing it twice is doing it once."""

    add: Mapping[Word, frozenset[str]]
    remove: Mapping[Word, frozenset[str]]

    @property
    def is_empty(self) -> bool:
        return not any(self.add.values()) and not any(self.remove.values())

    def applied_to(self, state: DesiredState) -> DesiredState:
        """What is wanted after it."""
        sets = {
            word: (state.names(word) - self.remove.get(word, frozenset())) | self.add.get(word, frozenset())
            for word in WORDS
        }
        return replace(state, **sets)


def cordon(names: Iterable[str]) -> DesiredChange:
    """No new requests for these."""
    return DesiredChange({"cordoned": frozenset(names)}, {})


def uncordon(names: Iterable[str]) -> DesiredChange:
    """They take requests again."""
    return DesiredChange({}, {"cordoned": frozenset(names)})


def set_role(name: str, role: Literal["prefill", "decode"]) -> DesiredChange:
    """The node is to have this role, now and whenever it starts."""
    other: Word = "decode" if role == "prefill" else "prefill"
    return DesiredChange({role: frozenset({name})}, {other: frozenset({name})})


class DesiredMemory:
    """What a watcher believes, and what a registry that lost its memory is to be told again. Pure."""

    def __init__(self) -> None:
        self._epoch: str | None = None
        self._known = DesiredState()

    def merge(self, epoch: str | None, fresh: DesiredState) -> tuple[DesiredState, DesiredChange]:
        """The state to believe, and the change that the registry needs to say so too.

        `epoch` as for `OutageGrace.merge`: another one means that the registry lost what it had.
        """
        lost: dict[Word, frozenset[str]] = {}
        if self._epoch is not None and epoch != self._epoch:
            # A role that somebody has chosen since then is the newer one.
            chosen = fresh.prefill | fresh.decode
            known = replace(self._known, prefill=self._known.prefill - chosen, decode=self._known.decode - chosen)
            lost = {word: missing for word in WORDS if (missing := known.names(word) - fresh.names(word))}
        self._epoch = epoch
        again = DesiredChange(lost, {})
        self._known = again.applied_to(fresh)
        return self._known, again
