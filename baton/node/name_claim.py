"""One name, one process: a process does not start under the name of a node or a router that lives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from baton.errors import BatonError, ConfigError, Unreachable
from baton.registry import Membership, NodeRecord

Asks = Callable[[NodeRecord], Awaitable[str]]
"""Which incarnation answers at a record's address. Raises Unreachable when nobody does, and another BatonError when the
answer does not say which."""


async def require_free_name(membership: Membership, name: str, asks: Asks) -> None:
    """Check, before a process starts, that its name is free; raises ConfigError when a process of that name lives, and
    when the registry does not answer.

    A record may outlive its process by its lease, so it does not count if nobody answers at its address, or another
    process does. If the answer does not say which process it is, the process lives if its record is still renewed.
    """
    unclear = await _unclear_records(await _namesakes(membership, name), asks)
    if unclear:
        await asyncio.sleep(max(record.lease_s for record in unclear))
        known = {record.incarnation for record in unclear}
        renewed = [record for record in await _namesakes(membership, name) if record.incarnation in known]
        if renewed:
            raise _name_taken(renewed[0])


async def require_first(membership: Membership, own: NodeRecord, asks: Asks) -> None:
    """Check, after a process has published its record, that it was the first of its name; raises ConfigError when
    another process, which started at the same moment, was earlier.

    Records that earlier processes of this name left behind are removed, so that nobody waits for their leases to end.
    """
    try:
        namesakes = await membership.namesakes(own.name)
        names = [record.incarnation for record in namesakes]
        earlier = namesakes[: names.index(own.incarnation)] if own.incarnation in names else ()
        unclear = await _unclear_records(earlier, asks)
        for record in earlier:
            if record not in unclear:
                await membership.retract(record)
    except Unreachable:
        return


async def start_number(membership: Membership, name: str) -> int:
    """The number of a process's start, for `NodeRecord.start_number`; 0 if the registry does not answer."""
    try:
        return await membership.next_start(name)
    except Unreachable:
        return 0


async def _namesakes(membership: Membership, name: str) -> list[NodeRecord]:
    try:
        return list(await membership.namesakes(name))
    except Unreachable as error:
        raise ConfigError(str(error)) from None


async def _unclear_records(records: Iterable[NodeRecord], asks: Asks) -> list[NodeRecord]:
    """The records whose processes may live; raises ConfigError for one whose process answers."""
    unclear = []
    for record in records:
        try:
            answer = await asks(record)
        except Unreachable:
            continue
        except BatonError:
            unclear.append(record)
            continue
        if answer == record.incarnation:
            raise _name_taken(record)
    return unclear


def _name_taken(record: NodeRecord) -> ConfigError:
    flag = "--router-id" if record.role == "router" else "--node-id"
    return ConfigError(
        f"the name {record.name} is taken: {record.incarnation} at {record.address} (pid {record.pid}) lives; "
        f"stop that one, or give this one a name of its own with {flag}"
    )
