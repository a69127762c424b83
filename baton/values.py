"""Dataclasses that are created thousands of times a second. They are frozen for mypy and readers, but not at run time.

A frozen dataclass sets each field by a call of `object.__setattr__`, which makes its construction several times slower:
that took a tenth of the time of a router, and of a simulated cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:
    from dataclasses import dataclass

    def value(*, frozen, slots):
        """As `dataclass(frozen=True, slots=True)`, with equality and hash by fields; changes are not prevented."""
        return dataclass(slots=slots, unsafe_hash=frozen)


__all__ = ["value"]
