"""The attacking process: it reads from stdin which attack to run on which target, and when to stop.

Each line is one JSON object. `{"attack": NAME, "target": {...}}` starts an attack and is answered by `{}`; an empty
line stops it, and the answer counts what the attacker received, by kind. Run it as
`python -m tests.hostile.attacker`.
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
            command = json.loads(line)
            fields = command["target"]
            target = Target(tuple(fields["grpc"]), tuple(fields["http"]), fields["has_tls"], fields["key"])
            over = threading.Event()
            attack = pool.submit(ATTACKS[command["attack"]], target, over)
            _write({})
            sys.stdin.readline()
            over.set()
            _write(attack.result())


def _write(counts: Mapping[str, int]) -> None:
    sys.stdout.write(json.dumps(counts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
