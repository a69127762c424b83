"""One name, one process: a process does not start under the name of a node or a router that lives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import structlog

from baton.errors import BatonError, ConfigError, NobodyListens, Unreachable
from baton.registry import Membership, NodeRecord
from baton.wire.liveness import nobody_listens

_log = structlog.get_logger(__name__)

Asks = Callable[[NodeRecord], Awaitable[str]]
"""Which incarnation answers at a record's address. Raises NobodyListens when its host proves that none does (see
`proving_absence`), and another BatonError when that remains unclear."""


async def require_free_name(membership: Membership, name: str, asks: Asks) -> None:
    """Check, before a process starts, that its name is free; raises ConfigError when a process of that name lives, and
    when the registry does not answer.

    A record may outlive its process by its lease, so it does not count if nobody listens at its address, or another
    process answers there. If neither is sure, the process lives if its record is still renewed.
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


async def proving_absence(address: str, answer: Awaitable[str]) -> str:
    """The answer of the process at HOST:PORT. Raises NobodyListens in place of Unreachable if its host refuses
    connections: a call fails for other reasons, too, while the process lives.
    """
    try:
        return await answer
    except Unreachable as error:
        if await nobody_listens(address):
            raise NobodyListens(str(error)) from error
        raise


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
            incarnation = await asks(record)
        except NobodyListens as error:
            why = str(error)
        except BatonError:
            unclear.append(record)
            continue
        else:
            if incarnation == record.incarnation:
                raise _name_taken(record)
            why = f"{incarnation} answers at its address"
        _log.info("an earlier process of this name is gone", node=record.name, earlier=record.incarnation, why=why)
    return unclear


def _name_taken(record: NodeRecord) -> ConfigError:
    flag = "--router-id" if record.role == "router" else "--node-id"
    return ConfigError(
        f"the name {record.name} is taken: {record.incarnation} at {record.address} (pid {record.pid}) lives; "
        f"stop that one, or give this one a name of its own with {flag}"
    )
