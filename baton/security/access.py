"""What a caller shows and whom it believes: a key, a certificate, an authority."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from baton.security.tls_files import TlsBytes, TlsFiles


@dataclass(frozen=True, slots=True)
class Access:
    """Without anything: in clear text, as nobody. `baton.wire.credentials` makes channels of it."""

    api_key: str = ""
    tls_ca: Path | None = None
    """The authority that the servers' certificates come from. None: clear text."""
    tls_cert: Path | None = None
    """For operators: their own certificate, and its key."""
    tls_key: Path | None = None
    cluster: str = "default"
    """Its name in the registry, which is in its certificates."""

    def tls(self) -> TlsBytes | None:
        """The files' contents; raises ConfigError."""
        return TlsFiles(self.tls_ca, self.tls_cert, self.tls_key).read() if self.tls_ca is not None else None

    def __repr__(self) -> str:
        return f"<Access {'with' if self.api_key else 'without'} a key, TLS by {self.tls_ca}>"


default_access: ContextVar[Access] = ContextVar("default_access", default=Access())  # noqa: B039, it is frozen
"""Of clients that were given none; the command sets it from its flags and its environment."""
