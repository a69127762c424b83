"""Which transports UCX chose for reads: it says so in its log alone, which is kept in memory and read here.

With UCX_PROTO_INFO it writes a table for every kind of operation and memory that an endpoint uses first, and none for
a later endpoint of the same kind:

    | decode-0.f3k intra-node cfg#1                                |
    | remote memory read by ucp_get* into cuda/GPU0 from cuda/GPU0 |
    | 0..inf | zero-copy | cuda_ipc/cuda                           |
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import NamedTuple

_READS = "remote memory read"
_OWN = " self "
"""In a table's title: the endpoint of a process to itself, which moves no KV."""
_LARGEST = "inf"
_ASKING = {"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "info"}
"""The environment with which UCX says what it chose."""
_LOG_FILE = "UCX_LOG_FILE"
_MOST_BYTES = 1 << 20
_MOST_LANES = 8


class ReadLane(NamedTuple):
    """How one kind of read is done, for some sizes."""

    kind: str
    """What is read, and where: `remote memory read by ucp_get* into cuda from cuda`."""
    sizes: str
    """Bytes, as `4001..inf`."""
    how: str
    """Such as zero-copy."""
    transport: str


def read_lanes(log: str) -> list[ReadLane]:
    """The lanes of reads between processes in a log of UCX, without repetitions."""
    found: dict[ReadLane, None] = {}
    title = kind = ""
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.partition("|")[2].split("|")][:-1]
        if len(cells) == 1:
            # A table has one or two lines of a single cell: whose it is, and what it is for.
            is_title = "cfg#" in cells[0]
            title, kind = (cells[0], "") if is_title else (title, cells[0])
        elif len(cells) == 3 and _READS in kind and _OWN not in f" {title} " and cells[0] != "Range":
            found.setdefault(ReadLane(kind, *cells))
    return list(found)


class UcxLog:
    """What UCX says of its lanes while it runs in this process. Belongs to one thread, `asked` apart."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._read_to = 0
        self._known: list[str] = []

    @contextmanager
    def asked(self, environ: MutableMapping[str, str]) -> Iterator[None]:
        """Within, UCX that starts writes its lanes into memory, unless its log is set up otherwise. Processes that are
        started later inherit nothing of it."""
        ours = not any(name in environ for name in (*_ASKING, _LOG_FILE))
        if ours:
            if self._file is None:
                self._file = os.memfd_create("ucx-log")
            environ.update(_ASKING | {_LOG_FILE: f"/proc/self/fd/{self._file}"})
        try:
            yield
        finally:
            for name in (*_ASKING, _LOG_FILE) if ours else ():
                environ.pop(name, None)

    def lane(self) -> str:
        """The transports of large reads that UCX has chosen since the last call, or if none those of before, of which
        one is that of the latest read; empty if it does not say."""
        new: dict[str, None] = dict.fromkeys(
            lane.transport for lane in read_lanes(self._news()) if lane.sizes.endswith(_LARGEST)
        )
        self._known = list(dict.fromkeys([*new, *self._known]))[:_MOST_LANES]
        return " or ".join(new or self._known)

    def _news(self) -> str:
        """What was written since the last call. It is given back to the system, so that the log does not grow."""
        if self._file is None:
            return ""
        # What UCX writes to a file stays in the C library's buffers until these are full.
        ctypes.CDLL(None).fflush(None)
        end = os.fstat(self._file).st_size
        start = self._read_to if self._read_to <= end else 0
        content = os.pread(self._file, min(end - start, _MOST_BYTES), start)
        if end:
            # UCX writes on behind what is gone, or from the start, as it has opened the file.
            os.ftruncate(self._file, 0)
        self._read_to = end
        return content.decode("utf-8", "replace")


ucx_log = UcxLog()
"""The log of this process, since UCX has one for all of it."""


def lane_of_reads() -> str:
    """`UcxLog.lane` of this process."""
    return ucx_log.lane()
