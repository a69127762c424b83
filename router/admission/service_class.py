"""The classes of requests, and the share that urgent ones have of what is served. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence


class ServiceClass(enum.IntEnum):
    """How urgent a request is among those of all tenants; smaller ones come first."""

    URGENT = 0
    NORMAL = 1
    BATCH = 2

    @classmethod
    def of(cls, priority: int, min_priority: int | None, named: str = "") -> ServiceClass:
        """The class of a request with this priority.

        `min_priority`: the smallest one that operators allow its tenant; None: there are no tenants. `named`: the class
        of its API key, of `baton.security.quotas.KeyClass`; empty: it has none.
        """
        if named:
            return cls[named.upper()]
        if min_priority is not None and min_priority > 0:
            return cls.BATCH
        return cls.URGENT if min_priority is not None and priority < 0 else cls.NORMAL


_BY_URGENCY = tuple(ServiceClass)
_NORMAL_FIRST = (ServiceClass.NORMAL, ServiceClass.URGENT, ServiceClass.BATCH)


class UrgentShare:
    """Which of urgent and normal requests is next while both wait, so that the urgent ones get a share of the tokens.

    What is placed while only one of the two waits does not count, so neither gains by a time without requests. The
    lead is bounded by the largest cost of a request.
    """

    def __init__(self, share: float, num_waiting: Callable[[ServiceClass], int]) -> None:
        """`num_waiting`: how many requests of a class wait."""
        self._share = share
        self._num_waiting = num_waiting
        self._lead = 0.0
        """By how many tokens the urgent ones are ahead of their share."""

    @property
    def order(self) -> Sequence[ServiceClass]:
        """The classes, the one of the next request first."""
        return _NORMAL_FIRST if self._lead > 0.0 else _BY_URGENCY

    def placed(self, service_class: ServiceClass, tokens: float) -> None:
        """A request that costs so many tokens has got nodes, and waits no more."""
        if service_class is ServiceClass.URGENT and self._num_waiting(ServiceClass.NORMAL):
            self._lead += tokens * (1.0 - self._share)
        elif service_class is ServiceClass.NORMAL and self._num_waiting(ServiceClass.URGENT):
            self._lead -= tokens * self._share

    def num_meanwhile(self, service_class: ServiceClass, num_own: float) -> float:
        """How many waiting requests of other classes come before so many of this one, if all cost as much."""
        num_urgent, num_normal = map(self._num_waiting, (ServiceClass.URGENT, ServiceClass.NORMAL))
        if service_class is ServiceClass.URGENT:
            return min(num_normal, num_own * (1.0 - self._share) / self._share)
        if service_class is ServiceClass.NORMAL:
            return num_urgent if self._share == 1.0 else min(num_urgent, num_own * self._share / (1.0 - self._share))
        return num_urgent + num_normal

    def giving_way_to(self, service_class: ServiceClass, max_waiting: int) -> Sequence[ServiceClass]:
        """The classes of which a request may give way to a new one in a full queue, the first one first.

        Of the places, too, urgent requests hold no more than their share against normal ones.
        """
        num_urgent, most = self._num_waiting(ServiceClass.URGENT), self._share * max_waiting
        if service_class is ServiceClass.URGENT and num_urgent >= most:
            return (ServiceClass.BATCH, ServiceClass.URGENT)
        if service_class is ServiceClass.NORMAL and num_urgent > most:
            return (ServiceClass.BATCH, ServiceClass.URGENT, ServiceClass.NORMAL)
        return [name for name in reversed(_BY_URGENCY) if name >= service_class]
