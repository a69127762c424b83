"""Values that are made thousands of times a second: frozen for whoever reads the code and for mypy, not at run time.

A frozen dataclass sets each of its fields by a call of `object.__setattr__`, so that making one takes several times as
long: a tenth of all the time of a router, or of a simulated cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:
    from dataclasses import dataclass

    def value(*, frozen, slots):
        """`dataclass(frozen=True, slots=True)`, which is equal and has a hash by its fields; nobody changes it."""
        return dataclass(slots=slots, unsafe_hash=frozen)


__all__ = ["value"]
