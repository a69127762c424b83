"""The hosts of a node meet: only those with its certificates, and no stranger keeps them from it."""

from __future__ import annotations

import datetime
import json
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError
from baton.runner.stage_spec import PROTOCOL
from baton.runner.stages.frames import StageLinks, heartbeat
from baton.security.authority import make_certificates
from baton.security.tls_files import LiveTls, certificate_files
from baton.wire import stage_hosts
from baton.wire.stage_hosts import FirstHost, StageListener, check_reachable


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs")
    make_certificates(directory, "default", ["127.0.0.1"], 1, datetime.datetime.now(datetime.UTC))
    return directory


@pytest.fixture(params=["clear text", "tls"])
def tls(request: pytest.FixtureRequest, certs: Path) -> LiveTls | None:
    return certificate_files(certs, "node").live() if request.param == "tls" else None


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


class Meeting:
    """A first host that waits for others, and what it has got."""

    def __init__(self, pool: ThreadPoolExecutor, tls: LiveTls | None, num_hosts: int = 2) -> None:
        self.listener = StageListener("127.0.0.1", 0, node_id="p0", cluster="default", tls=tls)
        self.other = FirstHost("127.0.0.1", self.listener.port, "p0", "default", num_hosts, 1, tls)
        self.accepted: Future[list[StageLinks]] = pool.submit(self.listener.accept, num_hosts)

    def finish(self, pool: ThreadPoolExecutor) -> None:
        """Let the others come, too, and end."""
        ends = [pool.submit(replace(self.other, rank=rank).connect) for rank in range(1, self.other.num_hosts)]
        accepted = self.accepted.result(20)
        for ours, theirs in zip(accepted, [end.result(20) for end in ends], strict=True):
            check_connected(ours, theirs)
        self.listener.close()


def check_connected(ours: StageLinks, theirs: StageLinks | None) -> None:
    assert theirs is not None
    for number, (one, other) in enumerate(zip(ours.sockets, theirs.sockets, strict=True), 100):
        other.sendall(bytes([number]))
        assert one.recv(1) == bytes([number])
        one.sendall(bytes([number]))
        while (received := other.recv(1)) != bytes([number]):
            assert received in heartbeat(), "only heartbeats come before"
    ours.close()
    theirs.close()


def hello_of(meeting: Meeting, **changes: Any) -> dict[str, Any]:
    valid = {
        "protocol": PROTOCOL,
        "cluster": "default",
        "node": "p0",
        "hosts": 2,
        "rank": 1,
        "connection": "down",
        "token": "a-process",
    }
    return valid | changes


def answer_to(meeting: Meeting, sent: bytes, tls: LiveTls | None) -> bytes:
    with socket.create_connection(("127.0.0.1", meeting.listener.port), timeout=10) as raw:
        context = None if tls is None else tls.now().client_context()
        connection = raw if context is None else context.wrap_socket(raw, server_hostname="node.default.baton")
        with connection:
            connection.sendall(sent)
            answer = bytearray()
            try:
                while received := connection.recv(1000):
                    answer += received
            except OSError:  # what was sent was not read
                return bytes(answer)
            return bytes(answer)


def test_hosts_meet(pool: ThreadPoolExecutor, tls: LiveTls | None) -> None:
    Meeting(pool, tls).finish(pool)
    Meeting(pool, tls, num_hosts=3).finish(pool)


def test_hosts_wait_for_the_first_one(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_hosts, "_RETRY_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tries = iter([False, False, False, True])
    other = FirstHost("127.0.0.1", port, "p0", "default", 2, 1, None)
    assert other.connect(lambda: next(tries)) is None
    assert next(tries, "none") == "none"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"node": "p1"}, "the node is 'p0' here, and 'p1' there"),
        ({"cluster": "other"}, "the cluster is 'default' here, and 'other' there"),
        ({"hosts": 3}, "the number of hosts is 2 here, and 3 there"),
        ({"protocol": 0}, f"the version of the protocol is {PROTOCOL} here, and 0 there"),
        ({"rank": 0}, "no connection 'down' of a host 0"),
        ({"rank": 2}, "no connection 'down' of a host 2"),
        ({"rank": "1"}, "no connection 'down' of a host '1'"),
        ({"connection": "sideways"}, "no connection 'sideways' of a host 1"),
        ({"token": None}, "no connection 'down' of a host 1"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_another_host_than_the_nodes_own_is_refused_with_the_reason(
    pool: ThreadPoolExecutor, changes: dict[str, Any], reason: str
) -> None:
    meeting = Meeting(pool, None)
    answer = answer_to(meeting, json.dumps(hello_of(meeting, **changes)).encode() + b"\n", None)
    assert reason in json.loads(answer)["error"]
    meeting.finish(pool)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"x" * 5000, b'{"protocol": 1'])
def test_strangers_get_no_answer_and_keep_nobody_away(
    pool: ThreadPoolExecutor, tls: LiveTls | None, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_hosts, "HELLO_S", 0.2)
    meeting = Meeting(pool, tls)
    assert answer_to(meeting, sent, tls) == b""
    monkeypatch.setattr(stage_hosts, "HELLO_S", 10.0)
    meeting.finish(pool)


def test_a_certificate_of_another_role_is_refused(pool: ThreadPoolExecutor, certs: Path) -> None:
    meeting = Meeting(pool, certificate_files(certs, "node").live())
    as_router = certificate_files(certs, "router").live()
    hello = json.dumps(hello_of(meeting)).encode() + b"\n"
    assert "the certificate is not that of a node" in json.loads(answer_to(meeting, hello, as_router))["error"]
    with pytest.raises(ConfigError, match="refused this one: the certificate is not that of a node of the cluster"):
        replace(meeting.other, tls=as_router).connect()
    meeting.finish(pool)


def test_a_host_without_a_certificate_is_told_what_it_needs(
    pool: ThreadPoolExecutor, certs: Path, tmp_path: Path
) -> None:
    meeting = Meeting(pool, certificate_files(certs, "node").live())
    make_certificates(tmp_path, "default", ["127.0.0.1"], 1, datetime.datetime.now(datetime.UTC))
    stranger = replace(meeting.other, tls=certificate_files(tmp_path, "node").live())
    with pytest.raises(ConfigError, match="give both hosts the node's certificate of the same authority"):
        stranger.connect()
    meeting.finish(pool)


def test_a_host_that_starts_again_replaces_its_half_open_connections(pool: ThreadPoolExecutor) -> None:
    meeting = Meeting(pool, None)
    address = ("127.0.0.1", meeting.listener.port)
    with socket.create_connection(address, timeout=10) as first, first.makefile("rb") as lines:
        first.sendall(json.dumps(hello_of(meeting)).encode() + b"\n")
        assert json.loads(lines.readline()) == {"ok": True}
        twice = answer_to(meeting, json.dumps(hello_of(meeting)).encode() + b"\n", None)
        assert "host 1 has its connection 'down' already" in json.loads(twice)["error"]
        # A new process of the same host has another token.
        meeting.finish(pool)
        assert lines.readline() == b""


def test_a_second_process_of_a_host_waits_until_the_first_is_gone(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_hosts, "_RETRY_S", 0.01)
    meeting = Meeting(pool, None, num_hosts=3)
    first = meeting.other.connect()
    assert first is not None
    tries = iter([False, False, True])
    assert meeting.other.connect(lambda: next(tries)) is None
    first.close()
    # The others of its node are still to come: whoever waits is taken when it is noticed that the first has ended.
    second = meeting.other.connect()
    last = replace(meeting.other, rank=2).connect()
    for ours, theirs in zip(meeting.accepted.result(20), (second, last), strict=True):
        check_connected(ours, theirs)
    meeting.listener.close()


def test_a_host_that_waits_for_others_gets_heartbeats(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_hosts, "INTERVAL_S", 0.01)
    meeting = Meeting(pool, None, num_hosts=3)
    first = meeting.other.connect()
    assert first is not None
    for _ in range(3):
        assert first.down.recv(len(heartbeat()), socket.MSG_WAITALL) == heartbeat()
    last = replace(meeting.other, rank=2).connect()
    assert last is not None
    for links in (*meeting.accepted.result(20), first, last):
        links.close()
    meeting.listener.close()


def test_an_error_while_taking_a_connection_is_no_end(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_hosts, "_ACCEPT_AGAIN_S", 0.0)
    accept, errors = socket.socket.accept, iter([OSError(24, "too many open files"), ConnectionAbortedError()])

    def fails_at_first(listening: socket.socket) -> Any:
        if (error := next(errors, None)) is not None:
            raise error
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", fails_at_first)
    Meeting(pool, None).finish(pool)


def test_one_address_can_not_keep_others_away(pool: ThreadPoolExecutor) -> None:
    meeting = Meeting(pool, None)
    idle = [socket.create_connection(("127.0.0.1", meeting.listener.port), timeout=10) for _ in range(12)]
    for connection in idle[stage_hosts._MOST_OF_HOST :]:
        assert connection.recv(1) == b""
    for connection in idle:
        connection.close()
    meeting.finish(pool)


@pytest.mark.parametrize(("host", "first_host"), [("127.0.0.1", "10.0.0.1:7000"), ("localhost", "gpu-1:7000")])
def test_hosts_that_can_not_reach_each_other_are_refused(host: str, first_host: str) -> None:
    with pytest.raises(ConfigError, match=r"listens on .* alone: give --host"):
        check_reachable(host, first_host)
    check_reachable("0.0.0.0", first_host)
    check_reachable(host, "127.0.0.1:7000")


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"can't listen for this node's other hosts at 192\.0\.2\.1:0"):
        StageListener("192.0.2.1", 0, node_id="p0", cluster="default", tls=None)
