"""The interface of a stage's process, for whoever has started it."""

from __future__ import annotations

from typing import Protocol


class StageProcess(Protocol):
    """The process of a stage, started by the leading one on this machine."""

    @property
    def pid(self) -> int: ...

    def how_it_ended(self) -> str:
        """How the process has ended, or ends within a second: `was ended by SIGKILL`; empty if it goes on."""
        ...

    def kill(self) -> None:
        """End the process at once; idempotent."""
        ...

    def end(self) -> None:
        """Wait until the process has ended, which it does since its connections are cut; it is killed if it does not.

        Idempotent.
        """
        ...
