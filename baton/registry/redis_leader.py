"""Which process of a cluster plans its moves, in Redis: one at a time, with a number for each that takes over.

The key has `TERM:INCARNATION` and expires LEAD_S after its leader confirmed it last. A leader that was suspended may
think that it still leads. So each of its writes names its term, and Redis carries it out only while the key has it
(WATCH, since the registry uses no script): a write of an earlier leader changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis import asyncio as redis
from redis.asyncio.client import Pipeline
from redis.exceptions import WatchError

from baton.errors import NotLeader
from baton.registry.base import LEAD_S, Term

_LEAD_MS = int(LEAD_S * 1e3)


async def lead(client: redis.Redis, key: str, counter: str, incarnation: str) -> Term | None:
    """Become or stay the leader for LEAD_S from now; None: another process leads."""
    async with client.pipeline(transaction=True) as pipe:
        await pipe.watch(key)
        holder = await pipe.get(key)
        if holder is None:
            number = int(await client.incr(counter))
            term = Term(number, incarnation)
            pipe.multi()  # type: ignore[no-untyped-call]  # redis has no type here
            pipe.set(key, _text(term), px=_LEAD_MS)
        else:
            known, _, name = _words(holder)
            if name != incarnation:
                return None
            term = Term(int(known), incarnation)
            pipe.multi()  # type: ignore[no-untyped-call]  # redis has no type here
            pipe.pexpire(key, _LEAD_MS)
        try:
            await pipe.execute()
        except WatchError:
            return None
    return term


async def resign(client: redis.Redis, key: str, term: Term) -> None:
    """End a term, if it has not ended."""
    async with client.pipeline(transaction=True) as pipe:
        try:
            await watch_term(pipe, key, term)
            pipe.delete(key)
            with as_not_leader(term):
                await pipe.execute()
        except NotLeader:
            return


async def watch_term(pipe: Pipeline, key: str, term: Term | None) -> None:
    """Begin a transaction that fails if the term ends before, see `as_not_leader`. Raises NotLeader if it has ended.

    Without a term the transaction depends on nothing.
    """
    if term is None:
        return
    await pipe.watch(key)
    holder = await pipe.get(key)
    if holder is None or "".join(_words(holder)) != _text(term):
        raise _not_leader(term)
    pipe.multi()  # type: ignore[no-untyped-call]  # redis has no type here


@contextmanager
def as_not_leader(term: Term | None) -> Iterator[None]:
    """Raises NotLeader if the transaction in it failed because the term has ended."""
    try:
        yield
    except WatchError:
        assert term is not None
        raise _not_leader(term) from None


def _not_leader(term: Term) -> NotLeader:
    return NotLeader(f"the term {term.number} of {term.incarnation} has ended: another router may plan moves now")


def _text(term: Term) -> str:
    return f"{term.number}:{term.incarnation}"


def _words(holder: bytes | str) -> tuple[str, str, str]:
    return (holder.decode(errors="replace") if isinstance(holder, bytes) else holder).partition(":")
