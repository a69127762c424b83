"""Reads that failed and may still write, and the one way out for them: that their peer is gone.

PeerGone is said of a peer as a whole (no read from it writes any more), but only to whoever asks for something. So a
block that such a read was to fill, and that is lost anyway, is asked for once more now and then.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.backends.base import PeerGone, ReadHandle, ReadRange, ReadState, ReadStuck, TransferBackend, let_go
from kv_transfer.mover.window import Piece

PROBE_S = 1.0
LONGEST_PROBE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Stuck:
    piece: Piece
    is_probe: bool = False


class StuckReads:
    """Belongs to the thread that owns the backend."""

    def __init__(self, backend: TransferBackend) -> None:
        self._backend = backend
        self._stuck: dict[ReadHandle, _Stuck] = {}
        self._probes: dict[str, ReadHandle] = {}
        """In flight, by peer."""
        self._interval_s = PROBE_S
        self._due = 0.0

    def __len__(self) -> int:
        return len(self._stuck)

    def add(self, handle: ReadHandle, piece: Piece, now: float) -> None:
        """`poll` has raised ReadStuck for a piece."""
        self._stuck[handle] = _Stuck(piece)
        self._interval_s = PROBE_S
        self._due = now + PROBE_S

    def pause(self, now: float) -> float | None:
        """Seconds until `over` is to be called again, None without stuck reads."""
        return max(0.0, self._due - now) if self._stuck else None

    def over(self, now: float) -> list[tuple[Piece, PeerGone]]:
        """Look, if it is time: the pieces of which nothing writes any more, each said once."""
        if not self._stuck or now < self._due:
            return []
        self._interval_s = min(2 * self._interval_s, LONGEST_PROBE_S)
        self._due = now + self._interval_s
        for piece in {stuck.piece.incarnation: stuck.piece for stuck in self._stuck.values()}.values():
            self._probe(piece)
        found = []
        for handle, stuck in list(self._stuck.items()):
            error = None if stuck.piece.incarnation in self._probes else self._release(handle)
            if error is not None and not stuck.is_probe:
                found.append((stuck.piece, error))
        return found

    def _release(self, handle: ReadHandle) -> PeerGone | None:
        """Why nothing of it writes any more; None: it may."""
        try:
            self._backend.poll(handle)
        except PeerGone as error:
            let_go(self._backend, handle)
            del self._stuck[handle]
            return error
        except ReadStuck:
            pass
        return None

    def _probe(self, piece: Piece) -> None:
        """Ask the peer for a block that is lost already: the answer is for the backend."""
        handle = self._probes.pop(piece.incarnation, None)
        try:
            handle = handle or self._post(piece)
            if self._backend.poll(handle) is ReadState.IN_PROGRESS:
                self._probes[piece.incarnation] = handle
                return
        except ReadStuck:
            assert handle is not None
            self._stuck[handle] = _Stuck(piece, is_probe=True)
            return
        except PeerGone:
            if handle is None:
                return
        let_go(self._backend, handle)

    def _post(self, piece: Piece) -> ReadHandle:
        lost = piece.ranges[0]
        return self._backend.post_read(piece.incarnation, (ReadRange(lost.local_block, lost.remote_block, 1),))
