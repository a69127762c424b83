"""A server that speaks the few routes of the Hugging Face Hub that fetching a model takes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """The files of one model, and how the server behaves."""

    repository: str
    files: Mapping[str, bytes]
    revision: str = "main"
    token: str = ""
    """The token that a caller must show; empty: the model is public."""
    is_gated: bool = False
    """Whether a caller without the token learns that the model exists."""
    cut: str = ""
    """The file of which only a half is sent."""
    url: str = ""
    requested: list[str] = field(default_factory=list)
    """Paths of all requests so far."""


@contextmanager
def hub_server(hub: Hub) -> Iterator[Hub]:
    """Serve the hub on a free port of loopback for the duration of the block."""

    class Handler(_Handler):
        served = hub

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""

    def _answer(self, *, with_body: bool) -> None:
        hub, path = self.served, urlsplit(self.path).path
        hub.requested.append(path)
        api, files = f"/api/models/{hub.repository}", f"/{hub.repository}/resolve/{COMMIT}/"
        if not path.startswith((f"{api}/", files)):
            self._refuse(401, "RepoNotFound")
        elif hub.token and self.headers.get("authorization") != f"Bearer {hub.token}":
            self._refuse(403, "GatedRepo") if hub.is_gated else self._refuse(401, "RepoNotFound")
        elif path.startswith(files):
            self._send_file(path.removeprefix(files), with_body=with_body)
        elif path in (f"{api}/revision/{hub.revision}", f"{api}/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in hub.files]
            self._send_json({"id": hub.repository, "sha": COMMIT, "siblings": siblings})
        elif path.startswith(f"{api}/tree/"):
            self._send_json([self._entry(name) for name in hub.files])
        else:
            self._refuse(404, "RevisionNotFound")

    def _entry(self, name: str) -> Mapping[str, object]:
        content = self.served.files[name]
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}  # noqa: S324

    def _send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self._head(200, {"content-type": "application/json", "content-length": str(len(body))})
        self.wfile.write(body)

    def _send_file(self, name: str, *, with_body: bool) -> None:
        content = self.served.files.get(name)
        if content is None:
            self._refuse(404, "EntryNotFound")
            return
        etag = hashlib.sha1(content).hexdigest()  # noqa: S324
        start = int(self.headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        length = {"content-length": str(len(content) - start)}
        self._head(206 if start else 200, {"etag": f'"{etag}"', "x-repo-commit": COMMIT, **length})
        if with_body and name == self.served.cut:
            self.wfile.write(content[start : start + (len(content) - start) // 2])
            self.close_connection = True
        elif with_body:
            self.wfile.write(content[start:])

    def _refuse(self, status: int, code: str) -> None:
        self._head(status, {"x-error-code": code, "x-error-message": code, "content-length": "0"})

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
