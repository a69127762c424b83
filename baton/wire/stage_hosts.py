"""Connects the hosts of one node: the first host listens, and the others' stages connect to it.

Each stage opens three connections (`StageLinks`). On each, behind the TLS handshake in which both sides show the
certificate of a node, it sends one line of JSON that says which connection it is, and gets one line back. A connection
that has not got so far within `HELLO_S` is closed, and so are strangers' before anything of theirs is read.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from baton.errors import ConfigError
from baton.runner.remote_stages.stage_links import StageLinks
from baton.runner.remote_stages.stage_spec import PROTOCOL
from baton.security.matrix import CallerRole, certificate_name, certificate_role
from baton.security.tls_files import LiveTls

HELLO_S = 10.0
_MOST_LINE = 1024
_MOST_HANDSHAKES = 64
"""The most connections that have not said yet what they are; further ones are closed."""
_KINDS = ("down", "up", "moves")
_RETRY_S = 1.0
_SAY_AGAIN_S = 30.0

_log = structlog.get_logger(__name__)


class _Refused(Exception):
    """A connection that is not taken, and why."""


@dataclass(slots=True)
class _Arriving:
    """The connections of one stage's process, as they arrive."""

    token: str
    connections: dict[str, socket.socket] = field(default_factory=dict)

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()


class StageListener:
    """Listens for the stages of a node's other hosts, until `close`."""

    def __init__(self, host: str, port: int, *, node_id: str, cluster: str, tls: LiveTls | None) -> None:
        """Raises ConfigError for an address on which this machine can't listen."""
        self._node_id = node_id
        self._cluster = cluster
        self._tls = tls
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            self._listening = socket.create_server((host, port), family=family, backlog=_MOST_HANDSHAKES)
        except OSError as error:
            raise ConfigError(f"can't listen for this node's other hosts at {host}:{port}: {error}") from error
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._arriving: dict[int, _Arriving] = {}
        self._num_handshakes = 0
        self._closed = False

    @property
    def port(self) -> int:
        """The port on which it listens."""
        port: int = self._listening.getsockname()[1]
        return port

    def accept(self, num_hosts: int) -> list[StageLinks]:
        """Wait for the stages of the hosts 1 to `num_hosts` - 1; returns this end of their connections, in order."""
        accepting = threading.Thread(target=self._accept, args=(num_hosts,), name="baton-stage-hosts", daemon=True)
        accepting.start()
        said: list[int] | None = None
        with self._changed:
            while missing := [rank for rank in range(1, num_hosts) if not self._is_complete(rank)]:
                if missing != said:
                    _log.info("waits for this node's other hosts", missing=missing, port=self.port)
                    said = missing
                self._changed.wait()
            arrived = [self._arriving.pop(rank).connections for rank in range(1, num_hosts)]
        addresses = [_address_of(each["up"]) for each in arrived]
        return [
            StageLinks(f"rank {rank} at {address}", each["down"], each["up"], each["moves"], address)
            for rank, (each, address) in enumerate(zip(arrived, addresses, strict=True), 1)
        ]

    def close(self) -> None:
        """Stop listening; idempotent. Connections of complete stages that `accept` returned stay."""
        with self._lock:
            self._closed = True
            for arriving in self._arriving.values():
                arriving.close()
            self._arriving.clear()
        with contextlib.suppress(OSError):  # some systems can't shut down what only listens
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _is_complete(self, rank: int) -> bool:
        return rank in self._arriving and len(self._arriving[rank].connections) == len(_KINDS)

    def _accept(self, num_hosts: int) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with self._lock:
                if self._closed or self._num_handshakes >= _MOST_HANDSHAKES:
                    connection.close()
                    continue
                self._num_handshakes += 1
            threading.Thread(
                target=self._meet, args=(connection, num_hosts), name="baton-stage-hello", daemon=True
            ).start()

    def _meet(self, connection: socket.socket, num_hosts: int) -> None:
        address = _address_of(connection)
        try:
            connection.settimeout(HELLO_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                wrapped = self._tls.now().peer_context().wrap_socket(connection, server_side=True)
                connection = wrapped
                _check_certificate(wrapped, self._cluster)
            try:
                self._take(connection, _read_line(connection), num_hosts)
            except _Refused as refused:
                connection.sendall(_line({"error": str(refused)}))
                raise
        except (OSError, ValueError, _Refused) as error:
            _log.warning("refused a connection of a stage", address=address, reason=str(error) or repr(error))
            connection.close()
        finally:
            with self._lock:
                self._num_handshakes -= 1

    def _take(self, connection: socket.socket, hello: dict[str, Any], num_hosts: int) -> None:
        for name, value, wanted in (
            ("version of the protocol", hello.get("protocol"), PROTOCOL),
            ("cluster", hello.get("cluster"), self._cluster),
            ("node", hello.get("node"), self._node_id),
            ("number of hosts", hello.get("hosts"), num_hosts),
        ):
            if value != wanted:
                raise _Refused(f"the {name} is {wanted!r} here, and {value!r} there")
        rank, kind, token = hello.get("rank"), hello.get("connection"), hello.get("token")
        if not isinstance(rank, int) or not 1 <= rank < num_hosts or kind not in _KINDS or not isinstance(token, str):
            raise _Refused(f"there is no connection {kind!r} of a host {rank!r}")
        with self._changed:
            if self._closed:
                raise _Refused("the node has all its hosts")
            arriving = self._arriving.get(rank)
            if arriving is None or arriving.token != token:
                if self._is_complete(rank):
                    raise _Refused(f"host {rank} is here already")
                if arriving is not None:
                    arriving.close()
                self._arriving[rank] = arriving = _Arriving(token)
            elif kind in arriving.connections:
                raise _Refused(f"host {rank} has its connection {kind!r} already")
            connection.sendall(_line({"ok": True}))
            connection.settimeout(None)
            arriving.connections[kind] = connection
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class FirstHost:
    """Where a node's first host listens for the others, and who connects."""

    host: str
    port: int
    node_id: str
    cluster: str
    num_hosts: int
    rank: int
    tls: LiveTls | None

    def connect(self, is_stopped: Callable[[], bool] = lambda: False) -> StageLinks | None:
        """Connect to the first host, and try again until it is there; None once `is_stopped`.

        Raises ConfigError where the first host refuses this one.
        """
        said_at = float("-inf")
        while not is_stopped():
            try:
                return self._connect()
            except ssl.SSLEOFError as error:
                why: Exception = error
            except ssl.SSLError as error:
                raise ConfigError(
                    f"no connection with certificates of the cluster {self.cluster!r} to the node's first host at "
                    f"{self.host}:{self.port}: {error}; give both hosts the node's certificate of the same authority"
                ) from error
            except (OSError, ValueError) as error:
                why = error
            if time.monotonic() - said_at >= _SAY_AGAIN_S:
                said_at = time.monotonic()
                _log.info("waits for the node's first host", address=f"{self.host}:{self.port}", reason=str(why))
            time.sleep(_RETRY_S)
        return None

    def _connect(self) -> StageLinks:
        token, connections = secrets.token_hex(16), dict[str, socket.socket]()
        try:
            for kind in _KINDS:
                connections[kind] = self._open(kind, token)
        except BaseException:
            for connection in connections.values():
                connection.close()
            raise
        return StageLinks("the first host", connections["down"], connections["up"], connections["moves"])

    def _open(self, kind: str, token: str) -> socket.socket:
        connection = socket.create_connection((self.host, self.port), timeout=HELLO_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.tls is not None:
                name = certificate_name(CallerRole.NODE, self.cluster)
                connection = self.tls.now().client_context().wrap_socket(connection, server_hostname=name)
            hello = {
                "protocol": PROTOCOL,
                "cluster": self.cluster,
                "node": self.node_id,
                "hosts": self.num_hosts,
                "rank": self.rank,
                "connection": kind,
                "token": token,
            }
            connection.sendall(_line(hello))
            answer = _read_line(connection)
            if "ok" not in answer:
                raise ConfigError(f"the node's first host refused this one: {answer.get('error', answer)!s:.500}")
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
        return connection


def _check_certificate(connection: ssl.SSLSocket, cluster: str) -> None:
    """Raise _Refused unless the other side has shown the certificate of a node of the cluster."""
    found = connection.getpeercert() or {}
    alternatives: Sequence[Any] = found.get("subjectAltName", ())
    names = [value for kind, value in alternatives if kind == "DNS"]
    if certificate_role(names, cluster) is not CallerRole.NODE:
        raise _Refused(f"the certificate is not that of a node of the cluster {cluster!r}")


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(values).encode() + b"\n"


def _read_line(connection: socket.socket) -> dict[str, Any]:
    """One line of JSON. Raises ValueError for anything else, and OSError."""
    line, until = bytearray(), time.monotonic() + HELLO_S
    while not line.endswith(b"\n"):
        # Byte by byte, since what follows is not of the line; a line is short.
        connection.settimeout(max(0.01, until - time.monotonic()))
        byte = connection.recv(1)
        if not byte or len(line) >= _MOST_LINE:
            raise ValueError("the connection did not say what it is")
        line += byte
    read = json.loads(line)
    if not isinstance(read, dict):
        raise ValueError("the connection did not say what it is")
    return read


def _address_of(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except (OSError, IndexError, TypeError):
        return "an unknown address"
