"""Names of requests, attempts, nodes and their incarnations.

A node's *incarnation* names one run of one node process, an *attempt* one try of a request on one pair of nodes. Both
travel in every message, so that nothing of an old run or an old try is ever mistaken for the new one.
"""

from __future__ import annotations

import re
from random import Random
from typing import NamedTuple

REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9_.:-]{1,64}\Z")
SCOPED_ID_PATTERN = re.compile(r"(?:[a-z0-9-]{1,32}/)?[A-Za-z0-9_.:-]{1,64}\Z")
"""Of a request as the cluster knows it: what its client calls it, behind its tenant, if there are tenants."""
_ATTEMPT_KEY = re.compile(r"(.*)#([0-9]+)(?:@([0-9a-f]+))?\Z", re.DOTALL)
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


class AttemptKey(NamedTuple):
    """One try of one request. `str()` of it is the request id that the engine sees: `REQUEST#ATTEMPT@FLIGHT`."""

    request_id: str
    attempt: int
    flight: int = 0
    """Drawn by the router for each flight, 64 bits: clients choose request ids and may well use one again, at once or
    at another router, and nothing of one flight may ever be taken for another's."""

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}" + (f"@{self.flight:x}" if self.flight else "")

    @classmethod
    def parse(cls, text: str) -> AttemptKey:
        """Read what `str()` wrote; raises ValueError for anything else."""
        found = _ATTEMPT_KEY.match(text)
        if found is None:
            raise ValueError(f"not an attempt key: {text!r}")
        return cls(found[1], int(found[2]), int(found[3] or "0", 16))


def scoped(tenant: str, name: str) -> str:
    """What a tenant calls so, as the cluster knows it: nobody else's name is ever the same."""
    return f"{tenant}/{name}" if tenant else name


def unscoped(name: str) -> str:
    """What its tenant calls it."""
    return name.rpartition("/")[2]


def tenant_of(name: str) -> str:
    """The tenant that the place belongs to; empty where there are no tenants."""
    return name.rpartition("/")[0]


def random_token(rng: Random, length: int = 10) -> str:
    """Random lower-case letters and digits without look-alikes."""
    return "".join(rng.choices(_ALPHABET, k=length))


def new_request_id(rng: Random) -> str:
    """A request id for a client that sent none."""
    return f"req-{random_token(rng, 16)}"


def new_incarnation(node_id: str, rng: Random) -> str:
    """The name of this run of the node; also the name of its transfer agent, which must never repeat."""
    return f"{node_id}.{random_token(rng)}"
