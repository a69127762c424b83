"""What a process that leads others tells them of adapters, and what they answer: lines of JSON.

Each process computes a part of the model. The one that asks is trusted, as with all that it tells the others.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from baton.errors import AdapterRefused, BatonError
from baton.model_formats.files import allowed_roots, only_below
from baton.runner.adapters.model_adapters import Checked
from baton.runner.backends.cpu.kernels.errors import RankLost

_MOST_TEXT = 4096
"""Longer refusals are cut."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterCommand:
    """What is to be done with an adapter."""

    do: Literal["check", "load", "free"]
    directory: str = ""
    digest: str = ""
    max_rank: int = 0
    slot: int = 0
    roots: Sequence[str] | None = None
    """The directories in and below which its files may be; None: anywhere."""
    names_elsewhere: bool = True
    """Whether the answer is to name modules without a place: of ranks it would be what this process knows."""

    def restricted(self) -> AdapterCommand:
        """The same for files where this thread may open them (`only_below`)."""
        return replace(self, roots=allowed_roots())


@dataclass(frozen=True, slots=True)
class AdapterAnswer:
    """What came of a command."""

    refusal: str = ""
    """Why it failed; empty if it did not."""
    may_pass: bool = False
    """Whether the files are not at fault: it may work later."""
    elsewhere: Sequence[str] = ()
    """The modules of the adapter that have no place in this part of the model."""


class AdapterPart(Protocol):
    """One process or several that this one leads, and that have a part of the model."""

    @property
    def name(self) -> str:
        """For messages: `rank 1`."""
        ...

    def ask(self, command: AdapterCommand) -> Future[AdapterAnswer]:
        """Have a command done behind those before it; a load and a check may last while others are done.

        Called from any thread. The answer is RankLost once the process has ended.
        """
        ...


class OpenQuestions:
    """The commands that other processes have not answered yet. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Future[AdapterAnswer]] = {}
        self._count = 0
        self._why_lost: str | None = None

    def ask(self, command: AdapterCommand, send: Callable[[bytes], None]) -> Future[AdapterAnswer]:
        """Number a command, and `send` it. An OSError of `send` leaves it to whoever watches the process."""
        answer: Future[AdapterAnswer] = Future()
        with self._lock:
            if self._why_lost is not None:
                answer.set_exception(RankLost(self._why_lost))
                return answer
            self._count += 1
            number = self._count
            self._open[number] = answer
        try:
            send(json.dumps({"number": number, **asdict(command)}).encode())
        except OSError as error:
            _log.warning("could not ask another process of an adapter: %s", error)
        return answer

    def answer(self, text: bytes | bytearray) -> None:
        """Take an answer. Raises ValueError for what is none."""
        try:
            read = json.loads(text)
            number = read.pop("number")
            answer = AdapterAnswer(**read)
            if not all(isinstance(name, str) for name in (answer.refusal, *answer.elsewhere)):
                raise TypeError(f"{read} are not texts")
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"this is no answer of a part of the model ({error!r})") from error
        with self._lock:
            asked = self._open.pop(number, None)
        if asked is not None:
            asked.set_result(answer)

    def fail(self, why: str) -> None:
        """Nobody answers any more. Idempotent."""
        with self._lock:
            if self._why_lost is None:
                self._why_lost = why
            left = list(self._open.values())
            self._open.clear()
        for asked in left:
            asked.set_exception(RankLost(why))


class HasAdapters(Protocol):
    """A process's part of a model's adapters, and those of the processes that it leads."""

    def check(self, directory: Path, max_rank: int) -> Checked: ...

    def load(self, directory: Path, digest: str, max_rank: int, slot: int) -> Mapping[str, str]: ...

    def free(self, slot: int) -> None: ...


class AdapterServant:
    """Does what the process that leads says of adapters, one after the other; loads and checks in threads of their own,
    so that no step waits for files."""

    def __init__(
        self,
        adapters: HasAdapters,
        answer: Callable[[bytes], None],
        roots: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        """`roots`: the directories in and below which this process may read adapters, whatever the command says."""
        self._adapters = adapters
        self._answer = answer
        self._roots = roots

    def take(self, text: bytes | bytearray) -> None:
        """Do what a command says. Raises ValueError for what is none."""
        read: dict[str, Any] = json.loads(text)
        number = int(read.pop("number"))
        try:
            command = AdapterCommand(**read)
        except TypeError as error:
            raise ValueError(f"this is no command of a leader ({error})") from error
        if self._roots is not None:
            command = replace(command, roots=self._roots())
        if command.do == "free":
            # At once: the next load may be into this slot.
            self._adapters.free(command.slot)
            self._say(number, AdapterAnswer())
            return
        name = f"baton-adapter-{command.do}"
        try:
            threading.Thread(target=self._do, args=(number, command), name=name, daemon=True).start()
        except RuntimeError as error:  # a limit of this process
            self._say(number, AdapterAnswer(f"its files can't be read now: {error}", may_pass=True))

    def _do(self, number: int, command: AdapterCommand) -> None:
        self._say(number, done(self._adapters, command))

    def _say(self, number: int, answer: AdapterAnswer) -> None:
        try:
            self._answer(json.dumps({"number": number, **asdict(answer)}).encode())
        except OSError as error:
            _log.warning("could not answer the process that leads: %s", error)


def done(adapters: HasAdapters, command: AdapterCommand) -> AdapterAnswer:
    """Do what a command says, and return what came of it; never raises an Exception."""
    directory = Path(command.directory)
    try:
        with nullcontext() if command.roots is None else only_below(command.roots):
            if command.do == "check":
                elsewhere = adapters.check(directory, command.max_rank).elsewhere
            elif command.do == "load":
                elsewhere = adapters.load(directory, command.digest, command.max_rank, command.slot)
            else:
                adapters.free(command.slot)
                elsewhere = {}
    except AdapterRefused as error:
        return AdapterAnswer(str(error)[:_MOST_TEXT], isinstance(error.__cause__, OSError | MemoryError | RuntimeError))
    except Exception as error:
        if not isinstance(error, BatonError):
            _log.exception("could not %s an adapter", command.do)
        return AdapterAnswer(f"{directory} could not be read: {error}"[:_MOST_TEXT], may_pass=True)
    return AdapterAnswer(elsewhere=list(elsewhere) if command.names_elsewhere else ())
