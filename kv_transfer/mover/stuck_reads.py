"""Reads that failed and may still write. They end only when their peer is gone.

A backend raises PeerGone for a peer as a whole (no read from it writes any more), but only when something is read from
that peer. So the mover probes: now and then it reads once more a block that a stuck read was to fill, and that is lost
anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kv_transfer.backends.base import (
    PeerGone,
    ReadHandle,
    ReadState,
    ReadStuck,
    TransferBackend,
    release_read,
)
from kv_transfer.mover.window import Piece

PROBE_INTERVAL_S = 1.0
MAX_PROBE_INTERVAL_S = 60.0
"""The interval between probes doubles from the first to the second value."""


@dataclass(frozen=True, slots=True)
class _StuckPiece:
    piece: Piece
    is_probe: bool = False
    """It was posted as a probe, and got stuck as well: nobody waits for it."""


class StuckReads:
    """The pieces of one mover whose reads are stuck. Belongs to the thread that owns the backend."""

    def __init__(self, backend: TransferBackend) -> None:
        self._backend = backend
        self._stuck: dict[ReadHandle, _StuckPiece] = {}
        self._probes: dict[str, ReadHandle] = {}
        """Probes in flight, by peer."""
        self._interval_s = PROBE_INTERVAL_S
        self._due = 0.0

    def __len__(self) -> int:
        return len(self._stuck)

    def add(self, handle: ReadHandle, piece: Piece, now: float) -> None:
        """Follow a piece for which `poll` has raised ReadStuck. `now`: seconds on the mover's clock."""
        self._stuck[handle] = _StuckPiece(piece)
        self._interval_s = PROBE_INTERVAL_S
        self._due = now + PROBE_INTERVAL_S

    def pause(self, now: float) -> float | None:
        """Seconds until `pop_ended` is to be called again; None without stuck reads."""
        return max(0.0, self._due - now) if self._stuck else None

    def pop_ended(self, now: float) -> list[tuple[Piece, PeerGone]]:
        """Probe, if it is time, and remove the pieces that don't write any more because their peer is gone."""
        if not self._stuck or now < self._due:
            return []
        self._interval_s = min(2 * self._interval_s, MAX_PROBE_INTERVAL_S)
        self._due = now + self._interval_s
        for piece in {stuck.piece.incarnation: stuck.piece for stuck in self._stuck.values()}.values():
            self._probe(piece)
        ended = []
        for handle, stuck in list(self._stuck.items()):
            error = None if stuck.piece.incarnation in self._probes else self._release(handle)
            if error is not None and not stuck.is_probe:
                ended.append((stuck.piece, error))
        return ended

    def _release(self, handle: ReadHandle) -> PeerGone | None:
        """Release a read if its peer is gone, and return that error; None: it may still write."""
        try:
            self._backend.poll(handle)
        except PeerGone as error:
            release_read(self._backend, handle)
            del self._stuck[handle]
            return error
        except ReadStuck:
            pass
        return None

    def _probe(self, piece: Piece) -> None:
        """Read a block that is lost already, so that the backend finds out whether the peer is gone."""
        handle = self._probes.pop(piece.incarnation, None)
        try:
            handle = handle or self._post(piece)
            if self._backend.poll(handle) is ReadState.IN_PROGRESS:
                self._probes[piece.incarnation] = handle
                return
        except ReadStuck:
            assert handle is not None
            self._stuck[handle] = _StuckPiece(piece, is_probe=True)
            return
        except PeerGone:
            if handle is None:
                return
        release_read(self._backend, handle)

    def _post(self, piece: Piece) -> ReadHandle:
        lost = piece.ranges[0]
        return self._backend.post_read(piece.incarnation, (replace(lost, count=1),))
