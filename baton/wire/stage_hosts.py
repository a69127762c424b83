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
from baton.runner.stage_spec import PROTOCOL
from baton.runner.stages.frames import INTERVAL_S, StageLinks, heartbeat
from baton.security.binds import is_loopback
from baton.security.matrix import CallerRole, certificate_name, certificate_role
from baton.security.tls_files import LiveTls

HELLO_S = 10.0
_MOST_LINE = 1024
_MOST_HANDSHAKES = 64
"""The most connections that have not said yet what they are; further ones are closed."""
_MOST_OF_HOST = 8
"""The most of them from one address."""
_ACCEPT_AGAIN_S = 0.1
_VANISHED_MS = 30_000
"""Milliseconds without an answer to what was sent after which a connection is lost (tcp(7), TCP_USER_TIMEOUT)."""
_KINDS = ("down", "up", "moves")
_RETRY_S = 1.0
_SAY_AGAIN_S = 30.0

_log = structlog.get_logger(__name__)


class _Refused(Exception):
    """A connection that is not taken, and why."""

    def __init__(self, why: str, *, may_pass: bool = False) -> None:
        """`may_pass`: the same may be taken later."""
        super().__init__(why)
        self.may_pass = may_pass


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
        self._meeting: list[str] = []
        """The addresses of connections that have not said yet what they are."""
        self._closed = False

    @property
    def port(self) -> int:
        """The port on which it listens."""
        port: int = self._listening.getsockname()[1]
        return port

    def accept(self, num_hosts: int, num_ranks: int = 1) -> list[StageLinks]:
        """Wait for the stages of the hosts 1 to `num_hosts` - 1; returns this end of their connections, in order.

        `num_ranks`: how many ranks each stage has, by which the first rank of each has its number.

        Those that are here and end meanwhile are waited for again.
        """
        accepting = threading.Thread(target=self._accept, args=(num_hosts,), name="baton-stage-hosts", daemon=True)
        accepting.start()
        said: list[int] | None = None
        with self._changed:
            while missing := [rank for rank in range(1, num_hosts) if not self._is_here(rank)]:
                if missing != said:
                    _log.info("waits for this node's other hosts", missing=missing, port=self.port)
                    said = missing
                self._changed.wait(INTERVAL_S)
            arrived = [self._arriving.pop(rank).connections for rank in range(1, num_hosts)]
        addresses = [_address_of(stage["up"]) for stage in arrived]
        return [
            StageLinks(f"rank {rank * num_ranks} at {address}", stage["down"], stage["up"], stage["moves"], address)
            for rank, (stage, address) in enumerate(zip(arrived, addresses, strict=True), 1)
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

    def _is_here(self, rank: int) -> bool:
        """Whether a rank has all its connections, and has not ended since."""
        if not self._is_complete(rank):
            return False
        try:
            self._arriving[rank].connections["down"].sendall(heartbeat())
        except OSError:
            self._arriving.pop(rank).close()
            return False
        return True

    def _accept(self, num_hosts: int) -> None:
        while True:
            try:
                connection, address = self._listening.accept()
            except OSError as error:
                with self._lock:
                    if self._closed:
                        return
                # accept(2): most errors are of the connection, or pass.
                _log.warning("could not take a connection of a stage", reason=str(error))
                time.sleep(_ACCEPT_AGAIN_S)
                continue
            host = str(address[0])
            with self._lock:
                if self._closed or len(self._meeting) >= _MOST_HANDSHAKES or self._meeting.count(host) >= _MOST_OF_HOST:
                    connection.close()
                    continue
                self._meeting.append(host)
            meeting = threading.Thread(
                target=self._meet, args=(connection, num_hosts, host), name="baton-stage-hello", daemon=True
            )
            try:
                meeting.start()
            except RuntimeError as error:
                _log.warning("could not take a connection of a stage", reason=str(error))
                connection.close()
                with self._lock:
                    self._meeting.remove(host)

    def _meet(self, connection: socket.socket, num_hosts: int, address: str) -> None:
        try:
            connection.settimeout(HELLO_S)
            _set_options(connection)
            if self._tls is not None:
                wrapped = self._tls.now().peer_context().wrap_socket(connection, server_side=True)
                connection = wrapped
            try:
                if isinstance(connection, ssl.SSLSocket):
                    _check_certificate(connection, self._cluster)
                self._take(connection, _read_line(connection), num_hosts)
            except _Refused as refused:
                connection.sendall(_line({"error": str(refused), "may_pass": refused.may_pass}))
                raise
        except Exception as error:
            # A stranger may send anything.
            _log.warning("refused a connection of a stage", address=address, reason=str(error) or repr(error))
            connection.close()
        finally:
            with self._lock:
                self._meeting.remove(address)

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
                raise _Refused("the node has all its hosts", may_pass=True)
            arriving = self._arriving.get(rank)
            if arriving is None or arriving.token != token:
                if self._is_complete(rank):
                    # The process that is here may have ended a moment ago.
                    raise _Refused(f"host {rank} is here already", may_pass=True)
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
            except (OSError, ValueError) as error:  # a TLS error is an OSError
                if isinstance(error, ssl.SSLError) and _is_final(error):
                    raise ConfigError(
                        f"no connection with certificates of the cluster {self.cluster!r} to the node's first host at "
                        f"{self.host}:{self.port}: {error}; give both hosts the node's certificate of the same "
                        "authority"
                    ) from error
                if time.monotonic() - said_at >= _SAY_AGAIN_S:
                    said_at = time.monotonic()
                    address = f"{self.host}:{self.port}"
                    _log.info("waits for the node's first host", address=address, reason=str(error))
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
            _set_options(connection)
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
                why = f"the node's first host refused this one: {answer.get('error', answer)!s:.500}"
                raise OSError(why) if answer.get("may_pass") is True else ConfigError(why)
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
        return connection


def check_reachable(host: str, first_host: str) -> None:
    """Raise ConfigError if hosts of a node are to meet at an address of the network while this one listens on loopback
    alone: for the other hosts, or for reads of its KV blocks."""
    if is_loopback(host) and not is_loopback(first_host.rpartition(":")[0]):
        raise ConfigError(
            f"the hosts of this node meet at {first_host}, but this one listens on {host} alone: give --host the "
            "address at which the others reach it"
        )


def _is_final(error: ssl.SSLError) -> bool:
    """Whether a handshake will fail again: for the certificates, and not for a connection that was cut."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return True
    return not isinstance(error, ssl.SSLEOFError) and any(
        text in str(error).upper() for text in ("ALERT", "CERTIFICATE", "WRONG_VERSION", "UNSUPPORTED")
    )


def _set_options(connection: socket.socket) -> None:
    """Send each frame at once, and notice a host that has vanished."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _VANISHED_MS)


def _check_certificate(connection: ssl.SSLSocket, cluster: str) -> None:
    """Raise _Refused unless the other side has shown the certificate of a node of the cluster."""
    certificate = connection.getpeercert() or {}
    alternatives: Sequence[Any] = certificate.get("subjectAltName", ())
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
