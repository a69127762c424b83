"""Names of requests, attempts, nodes and their incarnations.

An *incarnation* is one run of a node's process; an *attempt* is one try to serve a request on a pair of nodes. Messages
name both, so that no message of an earlier run or an earlier try is taken for one of the present.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9_.:-]{1,64}\Z")
SCOPED_ID_PATTERN = re.compile(r"(?:[a-z0-9-]{1,32}/)?[A-Za-z0-9_.:-]{1,64}\Z")
"""A request id inside the cluster: the client's request id, preceded by `TENANT/` if there are tenants."""
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_REQUEST_ID_CHARS = 26


class AttemptKey(NamedTuple):
    """One attempt of one request. Its `str()` is the request id that the engine uses: `REQUEST#ATTEMPT@FLIGHT`."""

    request_id: str
    attempt: int
    flight: int = 0
    """A random number of 64 bits that the router draws for each flight. Clients choose request ids and may use one
    twice, even at the same time and at different routers; this number keeps their flights apart."""

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}" + (f"@{self.flight:x}" if self.flight else "")


def scoped(tenant: str, name: str) -> str:
    """The cluster-wide form of a tenant's name, such as a request id. No other tenant can have the same one."""
    return f"{tenant}/{name}" if tenant else name


def unscoped(name: str) -> str:
    """The tenant's own form of a cluster-wide name."""
    return name.rpartition("/")[2]


def tenant_of(name: str) -> str:
    """The tenant that a cluster-wide name belongs to; empty where there are no tenants."""
    return name.rpartition("/")[0]


def random_token(rng: Random, length: int = 10) -> str:
    """Random lower-case letters and digits without look-alikes: 5 bits of chance in each."""
    bits = rng.getrandbits(5 * length)
    return "".join(_ALPHABET[bits >> 5 * position & 31] for position in range(length))


def new_request_id(rng: Random) -> str:
    """A request id for a client that sent none. It has 130 random bits, so that nobody guesses it: whoever knows the id
    can read or cancel the request.

    `rng`: a `SystemRandom`; from the numbers of any other generator its later ones can be computed.
    """
    return f"req-{random_token(rng, _REQUEST_ID_CHARS)}"


def new_incarnation(node_id: str, rng: Random) -> str:
    """The name of this run of the node; also the name of its transfer agent, which must never repeat."""
    return f"{node_id}.{random_token(rng)}"


@dataclass(frozen=True, slots=True)
class Peer:
    """One incarnation of another node: the one whose blocks hold a prompt's KV, or that has rows of an encoder."""

    node_id: str
    incarnation: str
    address: str
    """HOST:PORT of its gRPC server."""
