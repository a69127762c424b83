"""A cluster with certificates and keys, called with none, with wrong ones, and with those of another role or tenant."""

from __future__ import annotations

import datetime
import http.client
import ipaddress
import json
import os
import pickle
import random
import re
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.client import Access, GenerationClient, OperatorClient
from baton.errors import ExitCode, PermissionDenied, Unauthenticated
from baton.messages.generation import Finished, GenerateRequest
from baton.security.authority import make_certificates
from baton.security.keys import new_key, write_keys
from baton.security.matrix import CallerRole, callers_of_rpc
from baton.security.tls_files import certificate_files
from baton.wire.credentials import Dialer
from tests.support.free_ports import first_free_port
from tests.support.process_cluster import ProcessCluster, process_cluster
from tests.support.rpc_methods import METHODS

BOUND_S = 30.0
HARMLESS = ("GetStatus", "Describe", "Trace", "ListModels", "Attach", "Open", "Check")
"""Methods that may be called with an empty message and end at once."""
NAMES = ("prefill-0", "decode-0", "router-0")
_LISTEN = "0A"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def listening_sockets(pid: int) -> set[tuple[Address, int]]:
    """Return address and port of every TCP socket on which the process listens."""
    inodes = _sockets(pid)
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in inodes:
                host, _, port = fields[1].partition(":")
                found.add((_address(host), int(port, 16)))
    return found


def _sockets(pid: int) -> set[str]:
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            named = re.match(r"socket:\[(\d+)\]", os.readlink(descriptor))
        except OSError:
            continue
        if named:
            found.add(named[1])
    return found


def _address(text: str) -> Address:
    """Parse an address of /proc/net/tcp: words of four bytes in host order. IPv4-mapped IPv6 addresses become IPv4."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return getattr(address, "ipv4_mapped", None) or address


class Explosive:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@dataclass(frozen=True)
class Guarded:
    """The cluster with its certificates, keys and ports."""

    cluster: ProcessCluster
    certs: Path
    keys: dict[str, str]
    """The keys by tenant and role, like `acme-client`."""
    metrics_ports: dict[str, int]

    def access(self, key: str = "", certificate: str = "") -> Access:
        files = certificate_files(self.certs, certificate or "operator")
        own = (files.cert, files.key) if certificate else (None, None)
        return Access(self.keys.get(key, key), files.ca, *own)

    @property
    def router(self) -> tuple[str, str, str]:
        """The addresses of its three ports: public gRPC, operators' gRPC, HTTP."""
        process = self.cluster.process("router-0")
        return process.address, process.operator_address, process.http_address

    def pages(self) -> dict[str, str]:
        return {"router-0": self.router[2]} | {name: f"127.0.0.1:{port}" for name, port in self.metrics_ports.items()}

    def get(self, address: str, path: str, **headers: str) -> int:
        context = ssl.create_default_context(cafile=str(self.certs / "ca.crt"))
        connection = http.client.HTTPSConnection(address, timeout=BOUND_S, context=context)
        try:
            connection.request("GET", path, headers=headers)
            return connection.getresponse().status
        finally:
            connection.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Guarded]:
    home = tmp_path_factory.mktemp("guarded")
    make_certificates(home / "certs", "default", ["localhost", "127.0.0.1"], 1, datetime.datetime.now(datetime.UTC))
    who = [("acme", "client"), ("umbrella", "client"), ("ops", "operator"), ("wall", "monitor")]
    made = {f"{tenant}-{role}": new_key(tenant, CallerRole(role), "") for tenant, role in who}
    write_keys(home / "keys.json", [entry for _, entry in made.values()])
    keys = {name: key for name, (key, _) in made.items()}
    first = first_free_port(2)
    flags = ("--certs", str(home / "certs"), "--api-keys", str(home / "keys.json"), "--metrics-port", str(first))
    with process_cluster(home / "run", model, "--runner", "simulated", *flags) as cluster:
        yield Guarded(cluster, home / "certs", keys, {"prefill-0": first, "decode-0": first + 1})


def ask(guarded: Guarded, request_id: str = "", key: str = "acme-client") -> Finished:
    """Run one request that takes a prefill and a decode node."""
    with GenerationClient(guarded.router[0], access=guarded.access(key)) as client:
        *_, last = client.generate(GenerateRequest(list(range(40)), request_id, max_tokens=4))
    assert isinstance(last, Finished)
    assert (last.path.prefill_node, last.path.decode_node, last.path.attempts) == ("prefill-0", "decode-0", 1)
    return last


def code(dialer: Dialer, address: str, method: str) -> str:
    """Call a method with an empty message; return the status code."""
    with dialer.blocking_channel(address) as channel:
        metadata = tuple(dialer.metadata or ())
        call: Any = channel.stream_stream(method, None, None)(iter([b""]), timeout=BOUND_S, metadata=metadata)
        try:
            next(call, None)
        except grpc.RpcError as error:
            return str(error.code().name)
        finally:
            call.cancel()
    return "OK"


def served_at(guarded: Guarded) -> dict[str, list[str]]:
    """Return the addresses that serve each of Baton's methods."""
    nodes = [guarded.cluster.process(name).address for name in ("prefill-0", "decode-0")]
    addresses = {
        "Generation": [guarded.router[0]],
        "Operator": [guarded.router[1]],
        "Node": nodes,
        "EncoderRows": nodes,
        "KvLink": [guarded.cluster.process("prefill-0").address],
    }
    return {
        method: addresses[method.split("/")[1].rpartition(".")[2]] for method in METHODS if method.startswith("/baton.")
    }


def test_a_client_with_a_key_is_served_over_links_with_certificates(guarded: Guarded) -> None:
    assert ask(guarded).kv_bytes > 0
    for wrong, error in ((guarded.access(), Unauthenticated), (guarded.access("wall-monitor"), PermissionDenied)):
        with GenerationClient(guarded.router[0], access=wrong) as client, pytest.raises(error):
            client.list_models()
    status = guarded.cluster.baton("status", "-o", "json")
    assert (status.returncode, json.loads(status.stdout)["health"]) == (0, "ok"), status.stderr
    nodes = guarded.cluster.baton("get", "nodes", "-o", "wide", "--no-headers")
    assert (nodes.returncode, nodes.stderr, nodes.stdout.count(" Ready ")) == (0, "", 3)
    refused = guarded.cluster.baton("generate", "--token-ids", "1,2,3")
    assert (refused.returncode, refused.stdout) == (ExitCode.UNAUTHORISED, ""), refused
    assert "no API key was sent" in refused.stderr


def test_a_cluster_that_requires_keys_and_certificates_can_be_benchmarked(guarded: Guarded) -> None:
    small = ("--random-input-len", "24", "--random-output-len", "6", "--num-prompts", "4", "-o", "json")
    key = ("--api-key", guarded.keys["acme-client"])
    elsewhere = ("--port", guarded.router[0].rpartition(":")[2], "--tls-ca", str(guarded.certs / "ca.crt"))
    for words in (("serve", *elsewhere), ("serve", "--backend", "openai"), ("nodes",)):
        ran = guarded.cluster.baton("bench", *words, *key, *small)
        assert ran.returncode == 0, ran.stderr
        assert json.loads(ran.stdout)["total_output_tokens"] == 4 * 6


def test_no_rpc_is_served_without_the_right_key(guarded: Guarded) -> None:
    public = guarded.router[0]
    reflection = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    for method in (*(m for m in METHODS if "Generation" in m), reflection, "/baton.v1.Node/Describe", "/no.Such/Thing"):
        assert code(Dialer.to_public(guarded.access()), public, method) == "UNAUTHENTICATED"
        assert code(Dialer.to_public(guarded.access("nonsense")), public, method) == "UNAUTHENTICATED"
    for method in ("/baton.v1.Generation/ListModels", "/baton.v1.Generation/Cancel"):
        assert code(Dialer.to_public(guarded.access("wall-monitor")), public, method) == "PERMISSION_DENIED"
    with Dialer.to_public(guarded.access()).blocking_channel(public) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "baton.v1.Generation"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=BOUND_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("role", ["router", "node", "operator", ""])
def test_a_certificate_allows_the_rpcs_of_its_role_only(guarded: Guarded, role: str) -> None:
    access = guarded.access(certificate=role)
    for method, addresses in served_at(guarded).items():
        if "Generation" in method:
            continue
        dialer = Dialer.to_operator(access) if "Operator" in method else Dialer.to_nodes(access)
        for address in addresses:
            if not role:
                assert code(dialer, address, method) == "UNAVAILABLE"
            elif CallerRole(role) not in callers_of_rpc(method):
                assert code(dialer, address, method) == "PERMISSION_DENIED"
            elif method.endswith(HARMLESS):
                assert code(dialer, address, method) in ("OK", "INVALID_ARGUMENT")


def test_a_server_with_another_role_or_authority_is_rejected(guarded: Guarded, tmp_path: Path) -> None:
    ours, node = guarded.access(certificate="operator"), guarded.cluster.process("decode-0").address
    assert code(Dialer.to_operator(ours), node, "/baton.v1.Node/Describe") == "UNAVAILABLE"
    assert code(Dialer.to_nodes(replace(ours, cluster="other")), node, "/baton.v1.Node/Describe") == "UNAVAILABLE"
    make_certificates(tmp_path / "theirs", "default", [], 1, datetime.datetime.now(datetime.UTC))
    files = certificate_files(tmp_path / "theirs", "operator")
    stranger = Access("", files.ca, files.cert, files.key)
    assert code(Dialer.to_nodes(stranger), node, "/baton.v1.Node/Describe") == "UNAVAILABLE"
    mixed = replace(stranger, tls_ca=guarded.certs / "ca.crt")
    assert code(Dialer.to_nodes(mixed), node, "/baton.v1.Node/Describe") == "UNAVAILABLE"


def test_no_page_is_served_without_the_right_key_or_under_a_forged_host(guarded: Guarded) -> None:
    router, pages = guarded.router[2], guarded.pages()
    expected = {
        "/livez": (200, 200, 200, 200, 200),
        "/readyz": (200, 200, 200, 200, 200),
        "/health": (200, 200, 200, 200, 200),
        "/metrics": (401, 401, 403, 200, 200),
        "/v1/models": (401, 401, 200, 403, 200),
        "/v1/completions": (401, 401, 405, 403, 405),
        "/nothing": (401, 401, 404, 404, 404),
    }
    shown = ("", "nonsense", *(guarded.keys[name] for name in ("acme-client", "wall-monitor", "ops-operator")))
    for path, codes in expected.items():
        assert tuple(guarded.get(router, path, authorization=f"Bearer {key}") for key in shown) == codes, path
    for address in pages.values():
        assert [guarded.get(address, "/metrics", authorization=f"Bearer {key}") for key in shown] == [
            *(401, 401, 403, 200, 200)
        ]
        for path in ("/livez", "/metrics", "/v1/models"):
            forged = {"host": "evil.example", "authorization": f"Bearer {guarded.keys['ops-operator']}"}
            assert guarded.get(address, path, **forged) in (403, 404)


def test_a_tenant_can_not_see_another_tenants_request_or_cache(guarded: Guarded) -> None:
    assert ask(guarded, "mine").completion_tokens == 4
    for key, found in (("umbrella-client", False), ("acme-client", True)):
        headers = {"x-request-id": "mine", "last-event-id": "0", "authorization": f"Bearer {guarded.keys[key]}"}
        body = json.dumps({"prompt": list(range(40)), "max_tokens": 4, "stream": True})
        context = ssl.create_default_context(cafile=str(guarded.certs / "ca.crt"))
        connection = http.client.HTTPSConnection(guarded.router[2], timeout=BOUND_S, context=context)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json", **headers})
        assert connection.getresponse().status == (200 if found else 404)
        connection.close()
    # The same prompt is not in the cache of the other tenant.
    assert ask(guarded).cached_tokens > 0
    assert ask(guarded, key="umbrella-client").cached_tokens == 0


def test_garbage_at_every_port_harms_no_process(guarded: Guarded, tmp_path: Path) -> None:
    rng, bomb = random.Random(8), tmp_path / "exploded"
    shots = [
        rng.randbytes(700),
        pickle.dumps(Explosive(bomb)),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(300),
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n" + pickle.dumps(Explosive(bomb)),
        b"\x16\x03\x01" + rng.randbytes(200),
        b"\0" * 5000,
    ]
    before = {process.name: process.pid for process in guarded.cluster.state.processes}
    context = ssl.create_default_context(cafile=str(guarded.certs / "ca.crt"))
    context.check_hostname = False
    context.load_cert_chain(guarded.certs / "operator.crt", guarded.certs / "operator.key")
    for name in NAMES:
        for host, port in listening_sockets(before[name]):
            for shot in shots:
                shoot(str(host), port, shot, None)
                shoot(str(host), port, shot, context)
    assert ask(guarded).completion_tokens == 4
    assert {process.name: process.pid for process in guarded.cluster.state.processes} == before
    assert not bomb.exists()
    with pytest.raises(Unauthenticated):
        GenerationClient(guarded.router[0], access=guarded.access()).list_models()


def shoot(host: str, port: int, shot: bytes, context: ssl.SSLContext | None) -> None:
    try:
        with socket.create_connection((host, port), timeout=BOUND_S) as raw:
            # Bounds a handshake with a port that never answers, such as UCX's own.
            raw.settimeout(0.1)
            if context is None:
                raw.sendall(shot)
                return
            with context.wrap_socket(raw) as wrapped:
                wrapped.sendall(shot)
    except OSError:
        return


def test_only_the_documented_ports_listen_and_only_on_loopback(guarded: Guarded) -> None:
    """docs/security.md lists the same ports."""
    ports = {name: int(address.rpartition(":")[2]) for name, address in guarded.pages().items()}
    for name in NAMES:
        process = guarded.cluster.process(name)
        own = {int(where.rpartition(":")[2]) for where in (process.address, process.operator_address) if where}
        found = listening_sockets(process.pid)
        assert all(host.is_loopback for host, _ in found), found
        others = {port for _, port in found} - own - {ports[name]}
        # A node's transport also listens, on a port that it chooses.
        assert len(others) == (0 if name == "router-0" else 1), found
        assert {port for _, port in found} > own
    redis = guarded.cluster.process("redis")
    assert not listening_sockets(redis.pid)
    assert not listening_sockets(guarded.cluster.state.pid)


def test_a_cluster_without_configuration_listens_on_loopback_only(cluster: ProcessCluster) -> None:
    for process in cluster.state.processes:
        found = listening_sockets(process.pid)
        assert all(host.is_loopback for host, _ in found), (process.name, found)
        assert len(found) == {"redis": 0, "router": 3}.get(process.role, 2), (process.name, found)
    for name, status in (("localhost", 200), ("127.0.0.1:1", 200), ("evil.example", 403), ("", 403)):
        connection = http.client.HTTPConnection(cluster.state.http_address, timeout=BOUND_S)
        connection.request("GET", "/v1/models", headers={"host": name})
        assert connection.getresponse().status == status
        connection.close()


def test_an_operator_with_a_certificate_needs_no_run_directory(guarded: Guarded) -> None:
    client = OperatorClient(guarded.router[1], guarded.access(certificate="operator"))
    assert client.status(BOUND_S).health == "ok"
    client.close()
