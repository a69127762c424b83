"""The adapters of a model that several processes compute: each is loaded in all of them, or in none.

Ranks have columns of all layers, and stages some of the layers. Rules:

1. The process that leads chooses an adapter's slot, and every process loads it into this one.
2. A step names a slot only once all processes have loaded it.
3. If one fails, all others free the slot when they are done, and the adapter is refused.
4. A module that no stage knows is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

from baton.errors import AdapterRefused
from baton.model_formats.adapters import AdapterInfo
from baton.runner.adapters.commands import AdapterAnswer, AdapterCommand, AdapterPart, HasAdapters
from baton.runner.adapters.model_adapters import Checked, ModelAdapters

_Asked = Sequence[tuple[AdapterPart, Future[AdapterAnswer]]]


class AdaptersInParts:
    """The adapters of this process and of those that it leads. `check` and `load` may be called from any thread."""

    def __init__(self, own: HasAdapters, ranks: Sequence[AdapterPart] = (), stages: Sequence[AdapterPart] = ()) -> None:
        """`ranks`: those that compute the same layers as this process. `stages`: those that have the other layers."""
        self._own = own
        self._ranks = ranks
        self._stages = stages

    def check(self, directory: Path, max_rank: int) -> Checked:
        """Check an adapter as `load` does, and load nothing. Raises AdapterRefused, and RankLost."""
        # What ranks know of a model is what this process knows.
        asked = _ask(self._stages, AdapterCommand("check", str(directory), max_rank=max_rank))
        found = self._own.check(directory, max_rank)
        return found._replace(elsewhere=_nowhere(found.elsewhere, _answers(asked)))

    def load(self, directory: Path, digest: str, max_rank: int, slot: int) -> Mapping[str, str]:
        """Load an adapter into a slot everywhere; returns why some of its modules have no place anywhere.

        Raises AdapterRefused if one of the processes does, and RankLost; then the slot is free everywhere.
        """
        command = AdapterCommand("load", str(directory), digest, max_rank, slot)
        of_ranks = _ask(self._ranks, replace(command, names_elsewhere=False))
        of_stages = _ask(self._stages, command)
        try:
            elsewhere = self._own.load(directory, digest, max_rank, slot)
            _answers(of_ranks)
            return _nowhere(elsewhere, _answers(of_stages))
        except BaseException:
            # The slot is free for another adapter only when nobody loads this one any more.
            _wait(of_ranks, of_stages)
            _wait(self._free_others(slot))
            self._own.free(slot)
            raise

    def free(self, slot: int) -> None:
        """Free a slot everywhere, and the memory of the adapter that is in it, if one is."""
        # The others free it first: as soon as it is free here, another load may begin there. They do what they are told
        # in order, so no step waits for them.
        self._free_others(slot)
        self._own.free(slot)

    def _free_others(self, slot: int) -> _Asked:
        return _ask([*self._ranks, *self._stages], AdapterCommand("free", slot=slot))


class HostedAdapters:
    """The adapters of a runner's model (`AdapterHost`), of which none has a higher rank."""

    def __init__(self, own: ModelAdapters, parts: AdaptersInParts, max_rank: int) -> None:
        """`own`: those of this process, which are part of `parts`."""
        self._own = own
        self._parts = parts
        self._max_rank = max_rank
        self._lock = threading.Lock()
        self._loads: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        """By digest: held while this adapter is loaded, so that nobody else reads it, too."""

    def check(self, directory: Path) -> AdapterInfo:
        info, nowhere = self._parts.check(directory, self._max_rank)
        _require_places(nowhere.values())
        return info

    def load(self, directory: Path, digest: str) -> None:
        with self._lock:
            load = self._loads.setdefault(digest, threading.Lock())
        with load:
            if digest in self._own.slots:
                return
            slot = self._own.reserve()
            # The slot is freed once: at once somebody else may load another adapter into it.
            nowhere = self._parts.load(directory, digest, self._max_rank, slot)
            if nowhere:
                self._parts.free(slot)
            _require_places(nowhere.values())
            self._own.publish(digest, slot)

    def unload(self, digest: str) -> None:
        slot = self._own.slots.get(digest)
        if slot is not None:
            self._parts.free(slot)


def _ask(parts: Sequence[AdapterPart], command: AdapterCommand) -> _Asked:
    command = command.restricted() if parts else command
    return [(part, part.ask(command)) for part in parts]


def _wait(*asked: _Asked) -> None:
    for each in asked:
        for _, answer in each:
            answer.exception()


def _answers(asked: _Asked) -> list[AdapterAnswer]:
    """The answers, once all are there. Raises AdapterRefused for the first refusal, and RankLost."""
    _wait(asked)
    answers = [future.result() for _, future in asked]
    for (part, _), answer in zip(asked, answers, strict=True):
        if answer.refusal:
            # The cause says that it may pass.
            cause = RuntimeError(answer.refusal) if answer.may_pass else None
            raise AdapterRefused(f"{part.name}: {answer.refusal}") from cause
    return answers


def _nowhere(elsewhere: Mapping[str, str], answers: Iterable[AdapterAnswer]) -> Mapping[str, str]:
    """The modules that have no place here, nor in the stages that have answered."""
    for answer in answers:
        theirs = set(answer.elsewhere)
        elsewhere = {name: why for name, why in elsewhere.items() if name in theirs}
    return elsewhere


def _require_places(nowhere: Iterable[str]) -> None:
    """Raise AdapterRefused for a module that has no place in any stage."""
    for why in nowhere:
        raise AdapterRefused(why)
