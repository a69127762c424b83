"""What a load generator needs of an endpoint."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from baton.bench.workloads import WorkloadRequest
from baton.security.tls_files import TlsFiles

UNREACHABLE = "unreachable"
"""How errors begin that mean nobody is there: not even a connection. One that breaks may be made again."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and how they are spelled."""

    backend: str
    """baton (gRPC), openai (completions) or openai-chat."""
    address: str
    """HOST:PORT."""
    path: str = ""
    """Of the HTTP endpoint."""
    is_tls: bool = False
    model: str = ""
    vocab_size: int = 0
    api_key: str = ""
    temperature: float = 0.0
    ignore_eos: bool = True
    connections: int = 8
    """That gRPC streams of one process share."""
    tokenizer: str = ""
    """Model directory whose tokenizer makes text of prompts."""
    request_id_prefix: str = "bench"
    ttft_slo_ms: float | None = None
    """Told to a Baton router with each request: it refuses at once what it could not begin in time."""
    tls_ca: str = ""
    """The authority that its certificate comes from. Empty: those that this machine knows."""

    def tls(self) -> ssl.SSLContext | None:
        """What connections are made with; None: clear text. Raises ConfigError for an authority that is none."""
        if not self.is_tls:
            return None
        if self.tls_ca:
            TlsFiles(Path(self.tls_ca)).read()
        return ssl.create_default_context(cafile=self.tls_ca or None)

    @property
    def key_header(self) -> dict[str, str]:
        """That shows the key, if there is one."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(frozen=True, slots=True)
class Usage:
    """What an endpoint says of a request at its end."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    attempts: int = 1
    prefill_node: str = ""
    decode_node: str = ""
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    retry_after_s: float | None = None
    """When to come again, as a refusal said; None where it did not, and for everything else."""


class Listener(Protocol):
    """Who waits for an answer."""

    def on_tokens(self, count: int) -> None:
        """A message brought so many tokens."""
        ...

    def on_end(self, error: str | None, usage: Usage | None) -> None:
        """Called once."""
        ...


Cancel = Callable[[], None]
"""Nobody waits for the answer any more: the endpoint is told, the listener hears nothing more. Not after its end."""


class Endpoint(Protocol):
    """A way to send requests. Belongs to one event loop."""

    async def open(self) -> None:
        """Connect; raises Unreachable."""
        ...

    def prepare(self, request: WorkloadRequest) -> bytes:
        """The request as it goes over the wire: what can be done before it is due."""
        ...

    def send(self, message: bytes, listener: Listener) -> Cancel:
        """Send what was prepared."""
        ...

    def close(self) -> None:
        """Streams that are open hear nothing more."""
        ...
