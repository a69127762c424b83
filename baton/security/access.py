"""The credentials of a client: its API key, its certificate, and the certificate authority that it trusts."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from baton.security.tls_files import TlsBytes, TlsFiles

DEFAULT_CLUSTER = "default"
"""The name of a cluster in the registry and in certificates, if it is given no other."""


@dataclass(frozen=True, slots=True)
class Access:
    """The credentials of a client. The default is clear text without a key.

    `baton.wire.credentials` makes channels with them.
    """

    api_key: str = ""
    tls_ca: Path | None = None
    """Certificate authority of the servers' certificates. None: clear text."""
    tls_cert: Path | None = None
    """The client's own certificate, which operators need; `tls_key` is its key."""
    tls_key: Path | None = None
    cluster: str = DEFAULT_CLUSTER
    """The cluster's name in the registry, which its certificates contain."""

    def tls(self) -> TlsBytes | None:
        """Read the files. Raises ConfigError."""
        return TlsFiles(self.tls_ca, self.tls_cert, self.tls_key).read() if self.tls_ca is not None else None

    def __repr__(self) -> str:
        return f"<Access {'with' if self.api_key else 'without'} a key, TLS by {self.tls_ca}>"


default_access: ContextVar[Access] = ContextVar("default_access", default=Access())  # noqa: B039, it is frozen
"""The credentials of clients that were given none. Commands set them from flags and environment variables."""
