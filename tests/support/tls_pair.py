"""A connection over TLS between two sockets of this process."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from concurrent.futures import Future
from pathlib import Path

from baton.security.authority import make_certificates

WITHIN_S = 20.0


def tls_pair(directory: Path) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """Both ends of a connection. The certificates are made in the directory."""
    make_certificates(directory, "c", ["localhost"], 1, datetime.datetime.now(datetime.UTC))
    ours, theirs = socket.socketpair()
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(directory / "node.crt", directory / "node.key")
    calling = ssl.create_default_context(cafile=str(directory / "ca.crt"))
    calling.check_hostname = False
    accepted: Future[ssl.SSLSocket] = Future()
    thread = threading.Thread(target=lambda: accepted.set_result(serving.wrap_socket(theirs, server_side=True)))
    thread.start()
    called = calling.wrap_socket(ours)
    thread.join(WITHIN_S)
    return called, accepted.result(WITHIN_S)
