"""What the file of keys says of a tenant and of a key: quotas, the tenant's weight, and the names of classes."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

MAX_QUOTA = 10**9
"""The largest limit. With it a token counts for 60 ns of a minute, less than the store's times are rounded by."""
MIN_WEIGHT, MAX_WEIGHT = 0.01, 1000.0


class KeyClass(enum.StrEnum):
    """How urgent the requests of a key are among those of all tenants."""

    BATCH = "batch"
    NORMAL = "normal"
    URGENT = "urgent"


@dataclass(frozen=True, slots=True)
class Quotas:
    """The limits of one tenant, or of one key. None: there is no such limit."""

    max_concurrent: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None

    def __bool__(self) -> bool:
        return self != NO_QUOTAS

    def named(self, names: Mapping[str, str]) -> dict[str, int | None]:
        """The limits, each by what `names` calls it."""
        return {field: getattr(self, name) for name, field in names.items()}

    def written(self, names: Mapping[str, str]) -> dict[str, int]:
        """The same without limits that there are not."""
        return {field: limit for field, limit in self.named(names).items() if limit is not None}


QUOTA_NAMES = tuple(field.name for field in fields(Quotas))
TENANT_FIELDS: Mapping[str, str] = {name: name for name in QUOTA_NAMES}
"""What each limit is called in a tenant's entry of the file, and as an option of commands."""
KEY_FIELDS: Mapping[str, str] = {**TENANT_FIELDS, "max_concurrent": "max_concurrent_of_key"}
"""The same for a key. Its field max_concurrent was there before: it is for the key's tenant."""
NO_QUOTAS = Quotas()


@dataclass(frozen=True, slots=True)
class TenantSettings:
    """What the file says of a tenant beside its keys."""

    weight: float = 1.0
    """How much of the service it gets beside others that wait."""
    quotas: Quotas = NO_QUOTAS

    def written(self) -> dict[str, float | int]:
        """The entry in the file; empty: the tenant needs none."""
        return {**({} if self.weight == 1.0 else {"weight": self.weight}), **self.quotas.written(TENANT_FIELDS)}


def read_quotas(entry: Mapping[str, Any], names: Mapping[str, str]) -> Quotas:
    """The limits in an entry of the file. `names`: the entry's field of each limit. Raises ValueError."""
    found = {}
    for name, field in names.items():
        limit = entry.get(field)
        if limit is not None and (type(limit) is not int or not 1 <= limit <= MAX_QUOTA):
            raise ValueError(f"{field} must be a whole number of 1 to {MAX_QUOTA}, or null for no limit")
        found[name] = limit
    return Quotas(**found)


def read_tenant(entry: Mapping[str, Any]) -> TenantSettings:
    """The settings in an entry of the file. Raises ValueError."""
    known = ("weight", *QUOTA_NAMES)
    if not isinstance(entry, dict) or set(entry) - set(known):
        raise ValueError(f"a tenant may have {', '.join(known)}, and nothing else")
    weight = entry.get("weight", 1.0)
    if type(weight) not in (int, float) or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise ValueError(f"weight must be a number of {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
    return TenantSettings(float(weight), read_quotas(entry, TENANT_FIELDS))
