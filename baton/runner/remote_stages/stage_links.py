"""The connections between the leading stage and another one."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from baton.runner.remote_stages.frames import cut


@dataclass(frozen=True, slots=True, eq=False)
class StageLinks:
    """One end of the connections between the leading stage and another one. `down` and `up`
    carry frames one way, so that no two threads use a TLS connection at once; `moves` belongs to the thread that moves
    blocks."""

    name: str
    """The other end, for messages: `rank 1 at 10.0.0.2`."""
    down: socket.socket
    """From the leading stage to the other one."""
    up: socket.socket
    """From the other stage to the leading one."""
    moves: socket.socket
    """Between the leading stage's and the other stage's transfers of KV blocks; both ways."""
    host: str = ""
    """The address of the other end's host; empty: this host."""

    @classmethod
    def pair(cls, rank: int) -> tuple[StageLinks, StageLinks]:
        """The leading stage's end and that of a rank, within one machine."""
        downs, ups, moves = socket.socketpair(), socket.socketpair(), socket.socketpair()
        leader = cls(f"rank {rank}", downs[0], ups[0], moves[0])
        return leader, cls("the leader", downs[1], ups[1], moves[1])

    @property
    def sockets(self) -> tuple[socket.socket, socket.socket, socket.socket]:
        return self.down, self.up, self.moves

    def cut(self) -> None:
        """End everything that waits at a connection, here and at the other end; idempotent."""
        for connection in self.sockets:
            cut(connection)

    def close(self) -> None:
        """Close this end; idempotent. No thread may use it any more."""
        for connection in self.sockets:
            connection.close()
