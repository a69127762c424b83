"""The certificate and key of a process and the authority that it trusts, as files in PEM.

Certificates are replaced while processes serve. Before each handshake the process therefore checks whether the files
have changed. Changed files are used for new connections, and open connections stay. Files that do not belong together,
for example because only one of them has been written yet, are not used.
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
    """The paths of the files. `cert` and `key` are None for a client without a certificate of its own."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None

    @classmethod
    def of(cls, cert: Path | None, key: Path | None, ca: Path | None) -> TlsFiles | None:
        """The paths; None if none is given. Raises ValueError if only some are given."""
        if cert is None and key is None and ca is None:
            return None
        if cert is None or key is None or ca is None:
            raise ValueError("tls_cert, tls_key and tls_ca go together")
        return cls(ca, cert, key)

    def read(self) -> TlsBytes:
        """Read the files. Raises ConfigError for a file that can't be read or is not valid."""
        _check(self)
        cert, key = (None if path is None else _read(path) for path in (self.cert, self.key))
        return TlsBytes(_read(self.ca), cert, key)

    def live(self) -> LiveTls:
        """Read the files now, and again when they change. Raises ConfigError as `read` does."""
        return LiveTls(self)

    def server_context(self, *protocols: str) -> ssl.SSLContext:
        """The context of an HTTP server that offers these ALPN protocols and asks clients for no certificate.

        Each handshake uses the certificate that is in the files at that time. Raises ConfigError.
        """
        live = LiveTls(self)
        context, shown = self._context(protocols), live.now()

        def renew(connection: Any, _name: str | None, _context: Any) -> None:
            nonlocal context, shown
            if live.now() is not shown:
                shown = live.now()
                # The files may change again while they are read.
                with suppress(OSError):
                    context = self._context(protocols)
            connection.context = context

        first = context
        # OpenSSL calls this in each handshake, also if the client names no server.
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
    """The contents of the files, in PEM."""

    ca: bytes
    cert: bytes | None
    key: bytes | None

    def now(self) -> TlsBytes:
        """The same contents: the counterpart of `LiveTls.now` for contents that never change."""
        return self

    def client_context(self) -> ssl.SSLContext:
        """The context of a client that trusts this authority alone and shows its certificate if it has one.

        Raises OSError.
        """
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # As gRPC does: the named authority is trusted even if its certificate is signed by another one.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        with _as_file(self.ca) as ca:
            context.load_verify_locations(cafile=ca)
        if self.cert is not None and self.key is not None:
            with _as_file(self.cert) as cert, _as_file(self.key) as key:
                context.load_cert_chain(cert, key)
        return context

    def peer_context(self) -> ssl.SSLContext:
        """The context of a server for processes of the cluster, which must show a certificate of this authority.

        Raises OSError.
        """
        import ssl

        assert self.cert is not None
        assert self.key is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.verify_mode = ssl.CERT_REQUIRED
        with _as_file(self.ca) as ca, _as_file(self.cert) as cert, _as_file(self.key) as key:
            context.load_verify_locations(cafile=ca)
            context.load_cert_chain(cert, key)
        return context


class LiveTls:
    """The contents of files that are read again when they have changed. Thread-safe."""

    def __init__(self, files: TlsFiles) -> None:
        """Read the files. Raises ConfigError for a file that can't be read or is not valid."""
        self._files = files
        self._seen = _stamps(files)
        self._bytes = files.read()

    def now(self) -> TlsBytes:
        """The present contents: the same object until the files change."""
        stamps = _stamps(self._files)
        if stamps != self._seen:
            self._seen = stamps
            try:
                self._bytes = self._files.read()
                _log.info("certificates: the files in %s have changed and are used from now on", self._files.ca.parent)
            except ConfigError as error:
                _log.error("certificates: the changed files can't be used, and the old ones stay in use: %s", error)
        return self._bytes


def certificate_files(directory: Path, name: str) -> TlsFiles:
    """The files that `baton certs init` made for one role."""
    return TlsFiles(directory / "ca.crt", directory / f"{name}.crt", directory / f"{name}.key")


@contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """The path of a file in memory with this content. `ssl` reads keys from files only, and a private key must not be
    written to a disk."""
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
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror}): `baton certs init DIR` makes such files") from None


def _check(files: TlsFiles) -> None:
    """Raise ConfigError for invalid files, which gRPC would only report when a peer connects."""
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
            raise ConfigError(
                f"{files.cert} and {files.key} are not a certificate and its key: {_why(error)}"
            ) from None


def _why(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
