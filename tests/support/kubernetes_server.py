"""A small part of Kubernetes' API over TLS: `scale` of workloads, pods, and the rules of who may do what.

Its controllers act when the test says so. A Deployment's stops pods in the order of Kubernetes' own: those that are not
ready, then those with the lowest deletion cost. A LeaderWorkerSet's stops the groups with the highest numbers.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from baton.security.authority import make_certificates

COST = "controller.kubernetes.io/pod-deletion-cost"
NAMESPACE = "prod"
TOKEN = "secret-token"
RULES: Mapping[str, list[dict[str, list[str]]]] = {
    "Deployment": [
        {
            "apiGroups": ["apps"],
            "resources": ["deployments/scale"],
            "resourceNames": ["demo-baton-prefill", "demo-baton-decode", "demo-baton-encode"],
            "verbs": ["get", "patch"],
        },
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "patch"]},
    ],
    "LeaderWorkerSet": [
        {
            "apiGroups": ["leaderworkerset.x-k8s.io"],
            "resources": ["leaderworkersets/scale"],
            "resourceNames": ["demo-baton-prefill", "demo-baton-decode", "demo-baton-encode"],
            "verbs": ["get", "patch"],
        },
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    ],
}
"""What the chart lets routers do, and all that this server lets anybody do."""


@dataclass
class FakePod:
    name: str
    pool: str
    number: int
    ready: bool = True
    ending: bool = False
    version: str = "v1"
    annotations: dict[str, str] = field(default_factory=dict)


class FakeKubernetes:
    """The objects, and the answers to requests about them."""

    def __init__(self, kind: str, sizes: Mapping[str, int]) -> None:
        self.kind = kind
        self.replicas = {f"demo-baton-{pool}": size for pool, size in sizes.items()}
        self.pods = [self._pod(f"demo-baton-{pool}", n) for pool, size in sizes.items() for n in range(size)]
        for pod in self.pods:
            pod.ready = True
        self.revision = 7
        self.answer: tuple[int, bytes] | None = None
        """What every request is answered, while it is set."""
        self.hangs = False
        self.changes: list[tuple[str, Any]] = []
        self.port = 0

    def settle(self) -> None:
        """The controllers act, and all pods are ready or gone."""
        for pool, wanted in self.replicas.items():
            active = [pod for pod in self.pods if pod.pool == pool and not pod.ending]
            if self.kind == "Deployment":
                active.sort(key=lambda pod: (pod.ready, int(pod.annotations.get(COST, "0"))))
            else:
                active.sort(key=lambda pod: -pod.number)
            for pod in active[: max(0, len(active) - wanted)]:
                pod.ending = True
            # A LeaderWorkerSet's numbers have no gaps; a pod of a Deployment has a name of its own.
            first = len(active) if self.kind == "LeaderWorkerSet" else len(self.pods)
            self.pods += [self._pod(pool, first + n) for n in range(wanted - len(active))]
        self.pods = [pod for pod in self.pods if not pod.ending]
        for pod in self.pods:
            pod.ready = True
        self.revision += 1

    def _pod(self, pool: str, number: int) -> FakePod:
        return FakePod(f"{pool}-{number}", pool, number, ready=False)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection with one request."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            if self.hangs:
                await asyncio.Event().wait()
            method, target, _ = head.split(" ", 2)
            status, answer = self.answer or self._answered(method, target, headers, json.loads(body or b"null"))
            writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (status, len(answer)))
            writer.write(answer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    def _answered(self, method: str, target: str, headers: Mapping[str, str], change: Any) -> tuple[int, bytes]:
        url = urlsplit(target)
        parts = url.path.strip("/").split("/")
        group = "" if parts[0] == "api" else parts[1]
        namespace, resource, *rest = parts[parts.index("namespaces") + 1 :]
        name, part = [*rest, "", ""][:2]
        verb = {"GET": "get" if name else "list", "PATCH": "patch"}[method]
        if headers.get("authorization") != f"bearer {TOKEN}":
            return _failed(401, "Unauthorized")
        if namespace != NAMESPACE or not self._may(verb, group, f"{resource}/{part}".strip("/"), name):
            return _failed(403, f"cannot {verb} resource {resource} in API group {group}")
        if verb == "patch":
            assert headers["content-type"] == "application/merge-patch+json"
            self.changes.append((name, change))
        if resource == "pods":
            return self._pods(name, parse_qs(url.query), change)
        if name not in self.replicas:
            return _failed(404, f"{resource} {name} not found")
        if change is not None:
            if change["metadata"]["resourceVersion"] != str(self.revision):
                return _failed(409, "the object has been modified")
            self.replicas[name] = change["spec"]["replicas"]
            self.revision += 1
        replicas = self.replicas[name]
        label = "demo-pool" if self.kind == "Deployment" else "leaderworkerset.sigs.k8s.io/name"
        scale = {
            "metadata": {"name": name, "resourceVersion": str(self.revision)},
            "spec": {"replicas": replicas} if replicas else {},
            "status": {"replicas": replicas, "selector": f"{label}={name}"},
        }
        return 200, json.dumps(scale).encode()

    def _may(self, verb: str, group: str, resource: str, name: str) -> bool:
        return any(
            verb in rule["verbs"]
            and group in rule["apiGroups"]
            and resource in rule["resources"]
            and (name in rule.get("resourceNames", [name]) or resource.endswith("/scale"))
            for rule in RULES[self.kind]
        )

    def _pods(self, name: str, query: Mapping[str, list[str]], change: Any) -> tuple[int, bytes]:
        if change is None:
            pool = query["labelSelector"][0].partition("=")[2]
            return 200, json.dumps({"items": [_json(pod) for pod in self.pods if pod.pool == pool]}).encode()
        (pod,) = [pod for pod in self.pods if pod.name == name]
        for key, value in change["metadata"]["annotations"].items():
            if value is None:
                pod.annotations.pop(key, None)
            else:
                pod.annotations[key] = value
        return 200, json.dumps(_json(pod)).encode()


@asynccontextmanager
async def kubernetes_server(directory: Path, kind: str, sizes: Mapping[str, int]) -> AsyncIterator[FakeKubernetes]:
    """Serve the API. What a pod finds of its account is put into `directory`."""
    made = directory / "certificates"
    make_certificates(made, "c", ["127.0.0.1"], 1, datetime.datetime.now(datetime.UTC))
    for name, text in {"namespace": NAMESPACE, "token": TOKEN, "ca.crt": (made / "ca.crt").read_text()}.items():
        (directory / name).write_text(text)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(made / "router.crt", made / "router.key")
    api = FakeKubernetes(kind, sizes)
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        await api.serve(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    api.port = server.sockets[0].getsockname()[1]
    try:
        yield api
    finally:
        server.close()
        for task in connections:
            task.cancel()


def _json(pod: FakePod) -> dict[str, Any]:
    labels = {"pod-template-hash": pod.version, "leaderworkerset.sigs.k8s.io/group-index": str(pod.number)}
    metadata = {"name": pod.name, "resourceVersion": "1", "labels": labels, "annotations": pod.annotations}
    if pod.ending:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    conditions = [{"type": "Ready", "status": "True" if pod.ready else "False"}]
    return {"metadata": metadata, "spec": {}, "status": {"phase": "Running", "conditions": conditions}}


def _failed(code: int, message: str) -> tuple[int, bytes]:
    return code, json.dumps({"kind": "Status", "code": code, "message": message}).encode()
