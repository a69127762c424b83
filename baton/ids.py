"""Names of requests, attempts, nodes and their incarnations.

A node's *incarnation* names one run of one node process, an *attempt* one try of a request on one pair of nodes. Both
travel in every message, so that nothing of an old run or an old try is ever mistaken for the new one.
"""

from __future__ import annotations

import re
from random import Random
from typing import NamedTuple

REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9_.:-]{1,64}\Z")
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


class AttemptKey(NamedTuple):
    """One try of one request. `str()` of it is the request id that the engine sees: `REQUEST#ATTEMPT`."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> AttemptKey:
        """Read what `str()` wrote; raises ValueError for anything else."""
        request_id, mark, attempt = text.rpartition("#")
        if not mark or not attempt.isdigit():
            raise ValueError(f"not an attempt key: {text!r}")
        return cls(request_id, int(attempt))


def random_token(rng: Random, length: int = 10) -> str:
    """Random lower-case letters and digits without look-alikes."""
    return "".join(rng.choices(_ALPHABET, k=length))


def new_request_id(rng: Random) -> str:
    """A request id for a client that sent none."""
    return f"req-{random_token(rng, 16)}"


def new_incarnation(node_id: str, rng: Random) -> str:
    """The name of this run of the node; also the name of its transfer agent, which must never repeat."""
    return f"{node_id}.{random_token(rng)}"
