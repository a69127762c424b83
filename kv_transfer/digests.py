"""Digests of what a sender offers, by which a receiver knows that what it read is what had been computed."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

from baton.engine.block_hash import group_key
from baton.engine.block_pool import NULL_BLOCK
from baton.engine.request import Request
from baton.engine.runner.base import KVLayout
from baton.engine.runner.block_digests import BlockDigests

Found = TypeVar("Found")


class BlockName(NamedTuple):
    """What the digest of a sender's block is remembered by."""

    key: bytes
    """Of what it holds; empty when that has none."""
    is_cached: bool
    """It was computed for an earlier request."""


def block_names(request: Request, layout: KVLayout, first: int, count: int) -> Sequence[BlockName]:
    """Of `count` blocks of a prompt, from entry `first` of its table on."""
    groups, names = len(layout.groups), []
    num_cached = request.num_cached_tokens // layout.block_size
    for entry in range(first, first + count):
        stripe, group = divmod(entry, groups)
        is_named = stripe < len(request.block_hashes)
        key = group_key(request.block_hashes[stripe], group) if is_named else b""
        names.append(BlockName(key, stripe < num_cached))
    return names


class OfferedDigests:
    """Each is computed once, when its block was filled. Called from one thread.

    A block of a cached prefix keeps the digest that it had when it was computed: one that was damaged since is found.
    """

    def __init__(self, digests: BlockDigests) -> None:
        self._digests = digests
        self._known: dict[int, tuple[bytes, int]] = {}
        """By block: the key of what it held, and the digest of that."""

    def of(self, block_ids: Sequence[int], names: Sequence[BlockName]) -> Sequence[int]:
        """One for each of these blocks; 0 for the null block."""
        named = {block_id: name for block_id, name in zip(block_ids, names, strict=True) if block_id != NULL_BLOCK}
        missing = [block_id for block_id, name in named.items() if not self._is_known(block_id, name)]
        for block_id, digest in zip(missing, self._digests(missing), strict=True):
            self._known[block_id] = (named[block_id].key, digest)
        return [self._known[block_id][1] if block_id in named else 0 for block_id in block_ids]

    def _is_known(self, block_id: int, name: BlockName) -> bool:
        return name.is_cached and bool(name.key) and self._known.get(block_id, (b"",))[0] == name.key


class DigestThread(Generic[Found]):
    """Computes digests aside, for a loop that picks them up when it comes by: mostly nobody waits for them, and a loop
    that is woken for nothing delays whoever has something to say.

    All but what it computes belongs to the loop.
    """

    def __init__(self, wake: Callable[[], None], executor: Executor | None = None) -> None:
        """`wake` is called from the thread after `wake_for_next`, when something was found."""
        self._wake = wake
        self._executor = executor or ThreadPoolExecutor(1, "baton-digests", initializer=_step_back)
        self._found: deque[Found] = deque()
        self._awaited = False

    def submit(self, find: Callable[[], Found]) -> None:
        """Run `find`, which must not raise, in the thread."""
        self._executor.submit(self._run, find)

    def found(self) -> Iterator[Found]:
        """What has been found by now, in order, each once."""
        while self._found:
            yield self._found.popleft()

    def wake_for_next(self, awaited: bool) -> None:
        """Whether somebody waits for what is found from now on. What had been found before wakes nobody: look after."""
        self._awaited = awaited

    def pick_up(self, take: Callable[[Found], None], is_awaited: Callable[[], bool]) -> None:
        """Hand on what is known, and be woken for the rest if somebody waits for nothing else by then."""
        self._hand_on(take)
        self.wake_for_next(is_awaited())
        self._hand_on(take)

    def _hand_on(self, take: Callable[[Found], None]) -> None:
        for found in self.found():
            take(found)

    def close(self) -> None:
        """End the thread when it has done what it was given."""
        self._executor.shutdown()

    def _run(self, find: Callable[[], Found]) -> None:
        self._found.append(find())
        if self._awaited:
            self._wake()


def _step_back() -> None:
    # Of this thread alone, which Linux can do and others can't.
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
