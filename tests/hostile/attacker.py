"""A process that attacks: it is told on stdin what to do to whom, until it is told to stop.

Each line is one JSON object. `{"attack": NAME, "target": {...}}` begins and is answered `{}`; an empty line ends it,
and the answer is what the attacker was told, by kind. Run as `python -m tests.hostile.attacker`.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from tests.hostile import grpc_attacks, http1_attacks, http2_attacks, request_attacks
from tests.hostile.http2_attacks import Attack
from tests.hostile.peers import Target

ATTACKS: Mapping[str, Attack] = {
    **http2_attacks.ATTACKS,
    **http1_attacks.ATTACKS,
    **request_attacks.ATTACKS,
    **grpc_attacks.ATTACKS,
}


def main() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with ThreadPoolExecutor(1) as pool:
        while line := sys.stdin.readline():
            said = json.loads(line)
            fields = said["target"]
            target = Target(tuple(fields["grpc"]), tuple(fields["http"]), fields["has_tls"], fields["key"])
            over = threading.Event()
            attack = pool.submit(ATTACKS[said["attack"]], target, over)
            _tell({})
            sys.stdin.readline()
            over.set()
            _tell(attack.result())


def _tell(what: Mapping[str, int]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
