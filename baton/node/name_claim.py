"""One name, one process: whoever starts under the name of a node or a router that lives does not start."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from baton.errors import BatonError, ConfigError, Unreachable
from baton.registry import Membership, NodeRecord

Asks = Callable[[NodeRecord], Awaitable[str]]
"""Which incarnation answers at a record's address. Raises Unreachable when nobody is there, and another BatonError when
somebody is who does not say."""


async def require_free_name(membership: Membership, name: str, asks: Asks) -> None:
    """Before a process starts; raises ConfigError when one of its name lives, and when the registry does not answer.

    A record may outlive its process by its lease: one at whose address nobody is, or somebody else, stands in nobody's
    way. Who does not say lives if it goes on to renew its record.
    """
    unclear = await _look(await _namesakes(membership, name), asks)
    if unclear:
        await asyncio.sleep(max(record.lease_s for record in unclear))
        known = {record.incarnation for record in unclear}
        still = [record for record in await _namesakes(membership, name) if record.incarnation in known]
        if still:
            raise _taken(still[0])


async def require_first(membership: Membership, own: NodeRecord, asks: Asks) -> None:
    """After its record is published; raises ConfigError when one that came at the same moment was earlier.

    Records that an earlier process of this name left behind are taken back: nobody has to wait for their end.
    """
    try:
        found = await membership.namesakes(own.name)
        names = [record.incarnation for record in found]
        earlier = found[: names.index(own.incarnation)] if own.incarnation in names else ()
        unclear = await _look(earlier, asks)
        for record in earlier:
            if record not in unclear:
                await membership.retract(record)
    except Unreachable:
        return


async def start_number(membership: Membership, name: str) -> int:
    """For the record of a process that starts; 0 when the registry does not answer, see `NodeRecord.start_number`."""
    try:
        return await membership.next_start(name)
    except Unreachable:
        return 0


async def _namesakes(membership: Membership, name: str) -> list[NodeRecord]:
    try:
        return list(await membership.namesakes(name))
    except Unreachable as error:
        raise ConfigError(str(error)) from None


async def _look(records: Iterable[NodeRecord], asks: Asks) -> list[NodeRecord]:
    """Those of which nobody can say; raises ConfigError for one that answers."""
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
            raise _taken(record)
    return unclear


def _taken(record: NodeRecord) -> ConfigError:
    flag = "--router-id" if record.role == "router" else "--node-id"
    return ConfigError(
        f"the name {record.name} is taken: {record.incarnation} at {record.address} (pid {record.pid}) lives; "
        f"stop that one, or give this one a name of its own with {flag}"
    )
