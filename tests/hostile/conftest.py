"""Two clusters of the bundled model, one with keys and certificates and one without, and the process that attacks."""

from __future__ import annotations

import datetime
import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

import baton
from baton.client import Access, OperatorClient
from baton.security.authority import make_certificates
from baton.security.keys import new_key, write_keys
from baton.security.matrix import CallerRole
from baton.security.tls_files import certificate_files
from tests.hostile.peers import Target
from tests.hostile.witness import BOUND_S, Page, Victim, Watched
from tests.support.free_ports import first_free_port
from tests.support.process_cluster import ProcessCluster, process_cluster

ROOT = Path(__file__).parents[2]
MODEL = Path(baton.__file__).parent / "demo_model"
MODES = ("open", "guarded")
RUNS_LONG = os.environ.get("BATON_HOSTILE") == "long"
ATTACK_S = 10.0 if RUNS_LONG else 0.2
"""The duration of an attack in seconds; it also lasts until every victim has had an answer."""


class Attacker:
    """The attacking process; separate, so that it does not slow down the measurements."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile.attacker"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @contextmanager
    def attacking(self, name: str, target: Target) -> Iterator[dict[str, int]]:
        """Attack during the `with` block; afterwards the yielded dictionary counts the attacker's answers."""
        answers: dict[str, int] = {}
        self._send(json.dumps({"attack": name, "target": asdict(target)}))
        try:
            yield answers
        finally:
            answers.update(self._send(""))

    def close(self) -> None:
        self._process.communicate(timeout=BOUND_S)

    def _send(self, line: str) -> dict[str, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        found: dict[str, int] = json.loads(self._process.stdout.readline())
        return found


@dataclass
class Stage:
    """A cluster with its attacker, its victims and its observers."""

    mode: str
    cluster: ProcessCluster
    target: Target
    attacker: Attacker
    victim: Victim
    watched: Watched
    operator: OperatorClient

    def pids(self) -> dict[str, tuple[int, str]]:
        return {process.name: (process.pid, process.incarnation) for process in self.cluster.state.processes}

    def attack(self, name: str) -> dict[str, int]:
        """Run one attack beside the victims and return the answers that the attacker got."""
        over = threading.Event()
        with self.attacker.attacking(name, self.target) as answers:
            timer = threading.Timer(ATTACK_S, over.set)
            timer.start()
            self.victim.ask_until(over)
            timer.join()
        return answers


@contextmanager
def _stage(home: Path, mode: str, *flags: str, keys: dict[str, str], certs: Path | None) -> Iterator[Stage]:
    first = first_free_port(2)
    known = ("--metrics-port", str(first), "--threads", "1", "--allow-prompt-embeds", "on", *flags)
    with process_cluster(home / "run", MODEL, *known) as cluster:
        router = cluster.process("router-0")
        tls, access, operator = None, Access(), Access()
        if certs is not None:
            files = certificate_files(certs, "operator")
            tls = ssl.create_default_context(cafile=str(certs / "ca.crt"))
            access, operator = Access(keys["client"], files.ca), Access("", files.ca, files.cert, files.key)

        def page(address: str, role: str) -> Page:
            return Page(address, {"authorization": f"Bearer {keys[role]}"} if keys else {}, tls)

        def split_address(address: str) -> tuple[str, int]:
            host, _, port = address.rpartition(":")
            return host, int(port)

        pages = {
            "router-0": router.http_address,
            "prefill-0": f"127.0.0.1:{first}",
            "decode-0": f"127.0.0.1:{first + 1}",
        }
        attackers_key = keys.get("attacker", "")
        target = Target(
            split_address(router.address), split_address(router.http_address), certs is not None, attackers_key
        )
        attacker = Attacker()
        victim = Victim(router.address, page(router.http_address, "client"), access)
        operators = OperatorClient(router.operator_address, operator)
        try:
            victim.start()
            victim.have_schemas_compiled()
            # Its connection stays open, so it is counted from the beginning.
            operators.status()
            pids = {name: cluster.process(name).pid for name in pages}
            watched = Watched({name: page(address, "monitor") for name, address in pages.items()}, pids)
            yield Stage(mode, cluster, target, attacker, victim, watched, operators)
        finally:
            operators.close()
            victim.close()
            attacker.close()


@contextmanager
def _guarded(home: Path) -> Iterator[Stage]:
    make_certificates(home / "certs", "default", ["localhost", "127.0.0.1"], 1, datetime.datetime.now(datetime.UTC))
    who = {"client": ("acme", "client"), "attacker": ("umbrella", "client"), "monitor": ("wall", "monitor")}
    made = {name: new_key(tenant, CallerRole(role), "") for name, (tenant, role) in who.items()}
    write_keys(home / "keys.json", [entry for _, entry in made.values()])
    keys = {name: key for name, (key, _) in made.items()}
    flags = ("--certs", str(home / "certs"), "--api-keys", str(home / "keys.json"))
    with _stage(home, "guarded", *flags, keys=keys, certs=home / "certs") as stage:
        yield stage


@pytest.fixture(scope="module")
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    home = tmp_path_factory.mktemp(request.param)
    made = _guarded(home) if request.param == "guarded" else _stage(home, "open", keys={}, certs=None)
    with made as stage:
        yield stage
