"""The hosts of a node meet: only those with its certificates, and nobody can keep them from it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError
from baton.runner.remote_stages.stage_links import StageLinks
from baton.security.authority import make_authority
from baton.security.tls_files import LiveTls, TlsFiles, certificate_files
from baton.wire import stage_hosts
from baton.wire.stage_hosts import FirstHost, StageListener
