"""A process's certificate, its key, and the authority that it believes, as files in PEM.

Certificates are replaced while processes serve. So whoever is about to shake hands looks whether the files have
changed: what is there then counts from then on, connections that are open go on, and files that are no certificates (of
which, say, only one has been written yet) change nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.errors import ConfigError

if TYPE_CHECKING:
    import ssl

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths. `cert` and `key` are None for a client that has no certificate of its own."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None

    @classmethod
    def of(cls, cert: Path | None, key: Path | None, ca: Path | None) -> TlsFiles | None:
        """What was given; None when nothing was. Raises ValueError for a part of it."""
        if cert is None and key is None and ca is None:
            return None
        if cert is None or key is None or ca is None:
            raise ValueError("tls_cert, tls_key and tls_ca go together")
        return cls(ca, cert, key)

    def read(self) -> TlsBytes:
        """The contents; raises ConfigError for a file that can't be read or is no such thing."""
        _check(self)
        cert, key = (None if path is None else _read(path) for path in (self.cert, self.key))
        return TlsBytes(_read(self.ca), cert, key)

    def live(self) -> LiveTls:
        """The contents, whatever they come to be; raises ConfigError for what they are now."""
        return LiveTls(self)

    def server_context(self, *protocols: str) -> ssl.SSLContext:
        """For HTTP, of these protocols: shows the certificate that there is then, asks for none. Raises ConfigError."""
        live = LiveTls(self)
        context, shown = self._context(protocols), live.now()

        def renew(connection: Any, _name: str | None, _context: Any) -> None:
            nonlocal context, shown
            if live.now() is not shown:
                shown = live.now()
                # They may change once more while they are read.
                with suppress(OSError):
                    context = self._context(protocols)
            connection.context = context

        first = context
        # Called with each greeting, also of those who name no server.
        first.sni_callback = renew
        return first

    def _context(self, protocols: tuple[str, ...]) -> ssl.SSLContext:
        import ssl

        assert self.cert is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.cert, self.key)
        if protocols:
            context.set_alpn_protocols(list(protocols))
        return context


@dataclass(frozen=True, slots=True, repr=False)
class TlsBytes:
    """PEM."""

    ca: bytes
    cert: bytes | None
    key: bytes | None

    def now(self) -> TlsBytes:
        """As `LiveTls.now`: these never change."""
        return self

    def client_context(self) -> ssl.SSLContext:
        """For who connects: believes this authority alone, shows the certificate if there is one. Raises OSError."""
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # As gRPC does: whoever is named as the authority is believed, also if another one has signed it.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        with _as_file(self.ca) as ca:
            context.load_verify_locations(cafile=ca)
        if self.cert is not None and self.key is not None:
            with _as_file(self.cert) as cert, _as_file(self.key) as key:
                context.load_cert_chain(cert, key)
        return context


class LiveTls:
    """Files that are read again when they have changed. May be asked by any thread."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises ConfigError for a file that can't be read or is no such thing."""
        self._files = files
        self._seen = _stamps(files)
        self._bytes = files.read()

    def now(self) -> TlsBytes:
        """The contents; the same object until they change."""
        stamps = _stamps(self._files)
        if stamps != self._seen:
            self._seen = stamps
            try:
                self._bytes = self._files.read()
                _log.info("certificates: those in %s are new", self._files.ca.parent)
            except ConfigError as error:
                _log.error("certificates: those of before stay: %s", error)
        return self._bytes


def certificate_files(directory: Path, name: str) -> TlsFiles:
    """What `baton certs init` made for one role."""
    return TlsFiles(directory / "ca.crt", directory / f"{name}.crt", directory / f"{name}.key")


@contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """A path to this, in memory alone: it may be a key, and `ssl` reads files, with whatever is beside the PEM."""
    descriptor = os.memfd_create("pem")
    try:
        os.write(descriptor, data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _stamps(files: TlsFiles) -> list[tuple[int, int, int] | None]:
    return [_stamp(path) for path in (files.ca, files.cert, files.key) if path is not None]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror}): `baton certs init DIR` makes such files") from None


def _check(files: TlsFiles) -> None:
    """gRPC itself says nothing about a wrong file until somebody connects."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for path in (files.ca, files.cert, files.key):
        if path is not None:
            _read(path)
    try:
        context.load_verify_locations(cafile=str(files.ca))
    except ssl.SSLError as error:
        raise ConfigError(f"{files.ca} holds no certificate of an authority: {_why(error)}") from None
    if files.cert is not None:
        try:
            context.load_cert_chain(files.cert, files.key)
        except ssl.SSLError as error:
            raise ConfigError(f"{files.cert} and {files.key} are no certificate and its key: {_why(error)}") from None


def _why(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
