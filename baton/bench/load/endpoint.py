"""The interface through which a load generator sends requests to an endpoint."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from baton.bench.workloads.workload import WorkloadRequest
from baton.messages.generation import GenerateRequest
from baton.security.tls_files import TlsFiles

UNREACHABLE = "unreachable"
"""Prefix of errors that mean that no connection could be made. A connection that breaks later has other errors."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests are sent, and with which fields."""

    backend: str
    """baton (gRPC), openai (completions) or openai-chat."""
    address: str
    """HOST:PORT."""
    path: str = ""
    """Path of the HTTP endpoint."""
    is_tls: bool = False
    model: str = ""
    vocab_size: int = 0
    api_key: str = ""
    temperature: float = 0.0
    ignore_eos: bool = True
    connections: int = 8
    """Number of connections that the gRPC streams of one process share."""
    tokenizer: str = ""
    """Model directory whose tokenizer turns prompts into text."""
    request_id_prefix: str = "bench"
    ttft_slo_ms: float | None = None
    """Sent with each request to a Baton router, which refuses at once what it could not start in time."""
    tls_ca: str = ""
    """File of the certificate authority to trust. Empty: the authorities that this machine trusts."""

    def tls(self) -> ssl.SSLContext | None:
        """The TLS context of connections; None: clear text. Raises ConfigError if `tls_ca` holds no authority."""
        if not self.is_tls:
            return None
        if self.tls_ca:
            TlsFiles(Path(self.tls_ca)).read()
        return ssl.create_default_context(cafile=self.tls_ca or None)

    def request(self, request: WorkloadRequest, prompt: str | Sequence[int] | None = None) -> GenerateRequest:
        """What is asked for a request of a workload; `prompt`: in place of its token ids."""
        return GenerateRequest(
            request.token_ids(self.vocab_size) if prompt is None else prompt,
            f"{self.request_id_prefix}-{request.index}",
            model=self.model,
            temperature=self.temperature,
            max_tokens=max(1, request.output_length),
            ignore_eos=self.ignore_eos,
            ttft_slo_ms=self.ttft_slo_ms,
        )

    @property
    def key_header(self) -> dict[str, str]:
        """The header with the API key, if there is a key."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(frozen=True, slots=True)
class Usage:
    """What an endpoint reports about a request when the request ends."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    attempts: int = 1
    prefill_node: str = ""
    decode_node: str = ""
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    retry_after_s: float | None = None
    """Seconds after which to retry, as a refusal said; None for everything else."""


class Listener(Protocol):
    """Receives the answer to one request."""

    def on_tokens(self, count: int, text: str = "") -> None:
        """A message with `count` tokens and their text has arrived."""
        ...

    def on_end(self, error: str | None, usage: Usage | None) -> None:
        """The answer is complete or has failed. Called once."""
        ...


Cancel = Callable[[], None]
"""Cancels a request at the endpoint; its listener is not called any more. Must not be called after `on_end`."""


class Endpoint(Protocol):
    """Sends requests to a server. Belongs to one event loop."""

    async def open(self) -> None:
        """Connects; raises Unreachable."""
        ...

    def prepare(self, request: WorkloadRequest) -> bytes:
        """Encodes the request, so that nothing is left to compute when it is due."""
        ...

    def send(self, message: bytes, listener: Listener) -> Cancel:
        """Sends a message that `prepare` returned."""
        ...

    def close(self) -> None:
        """Closes all connections; listeners of open requests are not called any more."""
        ...
