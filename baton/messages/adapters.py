"""How adapters (LoRA) are named between roles: by the digest of their content. Names are for clients."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from baton.values import value

NO_ADAPTER = ""
"""The digest of a request that uses the base model alone."""

MAX_ADAPTERS = 256
"""The most adapters that a cluster has names for."""
MAX_LISTED = 2 * MAX_ADAPTERS
"""The most adapters that a router may name to a node: some have lost their names, and requests with them still run."""
MAX_NAME_CHARS = 128
MAX_DIRECTORY_BYTES = 1024
MAX_REFUSAL_CHARS = 400
"""Longer reasons are cut."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]*")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def is_adapter_digest(text: str) -> bool:
    """Whether a text can be the digest of an adapter."""
    return _DIGEST.fullmatch(text) is not None


def is_adapter_name(text: str) -> bool:
    """Whether clients can call an adapter so: letters, digits and _ . : / -, at most MAX_NAME_CHARS."""
    return len(text) <= MAX_NAME_CHARS and _NAME.fullmatch(text) is not None


def is_adapter_directory(text: str) -> bool:
    """Whether a text can be the directory of an adapter: an absolute path without control characters."""
    is_short = len(text) <= MAX_DIRECTORY_BYTES and len(text.encode(errors="replace")) <= MAX_DIRECTORY_BYTES
    return is_short and text.startswith("/") and text.isprintable()


@value(frozen=True, slots=True)
class AdapterSource:
    """An adapter's name for clients, its directory on the nodes, and its digest."""

    name: str
    directory: str
    digest: str

    @property
    def is_sound(self) -> bool:
        """Whether each part is one that Baton writes."""
        return is_adapter_name(self.name) and is_adapter_directory(self.directory) and is_adapter_digest(self.digest)


@dataclass(frozen=True, slots=True)
class AdapterList:
    """Router to node: all adapters that its requests may have, in place of those that it named before."""

    adapters: Sequence[AdapterSource]


@value(frozen=True, slots=True)
class AdapterStatus:
    """Whether a node acknowledges an adapter: only then it is sent requests with it."""

    digest: str
    refusal: str = ""
    """Why it does not; empty: it does."""


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """Node to router: the router's adapters that the node has checked."""

    adapters: Sequence[AdapterStatus]


@dataclass(frozen=True, slots=True)
class NodeAdapter:
    """An adapter on one node, for operators."""

    name: str
    digest: str
    directory: str
    state: str
    """checking, acknowledged, loaded or refused."""
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """The result of giving a name to an adapter."""

    digest: str
    rank: int
    num_bytes: int
    unchanged: bool = False
    """Whether the name had this adapter already."""
    warnings: Sequence[str] = ()
    """Why some nodes don't take it, one text for each."""


@dataclass(frozen=True, slots=True)
class AdapterRefusal:
    """A node that does not acknowledge an adapter."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class AdapterRow:
    """An adapter of the cluster, as one router sees it."""

    name: str
    digest: str
    directory: str
    nodes: Sequence[str] = ()
    """The nodes that acknowledge it."""
    refusals: Sequence[AdapterRefusal] = ()
