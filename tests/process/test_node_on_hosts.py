"""Nodes on two hosts each, with certificates: processes started by hand as on several machines, here on loopback."""

from __future__ import annotations

import datetime
import json
import re
import signal
import ssl
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any
from urllib.request import urlopen

import pytest

from baton.client import Access, GenerationClient
from baton.engine.request import Request
from baton.messages.generation import Chunk, Finished, GenerateRequest
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.registry.embedded import READY_WORDS, find_redis_server
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.spec import TorchSpec
from baton.security.authority import make_certificates
from router.placement.reasons import MOVED
from tests.oracle.test_token_exact import make_engine, run_all
from tests.process.shell import BOUND_S, Shell, refusal
from tests.process.test_by_hand import line_with
from tests.support.free_ports import first_free_port
from tests.support.tiny_models import TINY_MODELS

PROMPT = list(range(1, 40))
RANKS = {"prefill": 2, "decode": 1}
"""Ranks that each host of a node has."""
LONG = 1000
"""Tokens of a stream that runs for a second or more, so that something can happen to its node."""


@dataclass
class Site:
    """A router, and nodes whose hosts are processes of this machine."""

    shell: Shell
    directory: Path
    registry: str
    port: int
    """The first of six ports: Redis, the router's two, and where the first hosts of three nodes wait."""
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    """What each process has logged, as far as it was read."""

    def certificate(self, role: str) -> tuple[object, ...]:
        certs = self.directory / "certs"
        return "--tls-cert", certs / f"{role}.crt", "--tls-key", certs / f"{role}.key", "--tls-ca", certs / "ca.crt"

    def node_words(self, role: str, rank: int, name: str = "", **others: str) -> tuple[object, ...]:
        """The command of one of the two hosts of a node, which has the name of its role or another one."""
        first = f"127.0.0.1:{self.port + 3 + ('prefill', 'decode', 'another').index(name or role)}"
        hosts = ("--hosts", 2, "--host-rank", rank, "--first-host", first, "--metrics-port", 0)
        return *self.plain_words(role, name or role, **others), *hosts, "--tp", RANKS[role]

    def plain_words(self, role: str, name: str, model: str = "model", certificate: str = "node") -> tuple[object, ...]:
        """The command of a node on one host."""
        words = ("node", "--role", role, "--node-id", name, "--registry", self.registry, "--threads", 1)
        cache = ("--kv-cache-memory", "32MiB", "--model", self.directory / model)
        return *words, *cache, *self.certificate(certificate)

    def start(self, name: str, *words: object) -> subprocess.Popen[bytes]:
        """Start a process of that name."""
        self.running[name] = self.shell.start(*words, stderr=subprocess.PIPE)
        self.said[name] = ""
        return self.running[name]

    def start_node(self, role: str) -> None:
        for rank in (1, 0):
            self.start(f"{role}-{rank}", *self.node_words(role, rank))

    def line_from(self, name: str, words: str) -> str:
        """Wait for a line with these words in a process's log; fails when it ends before."""
        stderr = self.running[name].stderr
        assert stderr is not None
        for line in map(bytes.decode, stderr):
            self.said[name] += line
            if words in line:
                return line
        raise AssertionError(f"{words!r} never came: {self.said[name]}")

    def ended(self, name: str) -> tuple[int, str]:
        """Wait for a process to end; returns its exit code and the last line that it wrote."""
        process = self.running.pop(name)
        self.said[name] += process.communicate(timeout=BOUND_S)[1].decode()
        return process.returncode, self.said[name].splitlines()[-1]

    def operator(self, *words: object) -> Any:
        """What a command of an operator says, as JSON."""
        _, cert, _, key, _, authority = map(str, self.certificate("operator"))
        environment = {"BATON_TLS_CERT": cert, "BATON_TLS_KEY": key, "BATON_TLS_CA": authority}
        address = f"127.0.0.1:{self.port + 2}"
        done = self.shell.baton(*words, "-o", "json", "--address", address, environment=environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def wait_until_ready(self, *names: str) -> None:
        """Wait until these nodes have started and the router knows all of them."""
        for name in names:
            if '"ready"' not in self.said[name]:
                self.line_from(name, '"ready"')
        while True:
            nodes = self.operator("get", "nodes", "-l", "status=Ready")["items"]
            if {name.partition("-")[0] for name in self.running} == {node["name"] for node in nodes}:
                return

    def ask(self, max_tokens: int, began: Callable[[], object] = bool) -> tuple[list[int], Finished]:
        """Stream one request; `began` is called at its first token."""
        access = Access(tls_ca=self.directory / "certs" / "ca.crt")
        request = GenerateRequest(PROMPT, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        tokens: list[int] = []
        with GenerationClient(f"127.0.0.1:{self.port + 1}", access=access) as client:
            for event in client.generate(request, BOUND_S):
                if isinstance(event, Chunk):
                    tokens += event.token_ids
                    began()
        assert isinstance(event, Finished)
        return tokens, event

    def during_two_streams(self, act: Callable[[], None]) -> list[tuple[list[int], Finished]]:
        """What two streams give, one on each of two idle nodes, in the middle of which something happens."""
        with ThreadPoolExecutor(2) as pool:
            streams = []
            for _ in range(2):
                began = Event()
                streams.append(pool.submit(self.ask, LONG, began.set))
                assert began.wait(BOUND_S)
            act()
            return [stream.result(BOUND_S) for stream in streams]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A router, and a prefill and a decode node on two hosts each."""
    directory = tmp_path_factory.mktemp("hosts")
    for name, seed in (("model", 1), ("other", 2)):
        write_random_model(directory / name, {**TINY_MODELS["llama"], "max_position_embeddings": 2048}, seed=seed)
    make_certificates(directory / "certs", "default", ["127.0.0.1"], 1, datetime.datetime.now(datetime.UTC))
    shell, port = Shell(directory / "home"), first_free_port(6)
    site = Site(shell, directory, f"redis://127.0.0.1:{port}", port)
    redis = [str(find_redis_server()), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    with subprocess.Popen(redis, stdout=subprocess.PIPE, cwd=shell.home, env=shell.environment) as registry:
        try:
            line_with(READY_WORDS, registry.stdout)
            ports = ("--grpc-port", port + 1, "--operator-port", port + 2)
            common = ("--registry", site.registry, "--model", directory / "model", *site.certificate("router"))
            site.start("router", "router", "--router-id", "router", *common, *ports)
            site.line_from("router", "ready: ")
            site.start_node("prefill")
            site.start_node("decode")
            yield site
        finally:
            for process in site.running.values():
                process.kill()
                process.communicate()
            registry.terminate()
    shell.assert_nothing_left()


@pytest.fixture(scope="module")
def wanted(site: Site) -> list[int]:
    """The tokens of one process."""
    with closing(load_runner(TorchSpec(site.directory / "model", num_blocks=256))) as runner:
        sampling = SamplingParams(temperature=0.0, max_tokens=LONG)
        return run_all(make_engine(runner), [Request("one", RequestSpec(PROMPT, sampling))])["one"]


def test_two_nodes_on_two_hosts_each_serve_and_show_their_ranks(site: Site, wanted: list[int]) -> None:
    site.wait_until_ready("prefill-0", "decode-0")
    tokens, end = site.ask(40)
    assert tokens == wanted[:40]
    assert (end.path.prefill_node, end.path.decode_node, end.path.attempts) == ("prefill", "decode", 1)
    assert end.kv_bytes > 0
    assert site.operator("get", "leases")["items"] == []
    trusted = ssl.create_default_context(cafile=str(site.directory / "certs" / "ca.crt"))
    for role in ("prefill", "decode"):
        report = site.operator("describe", "node", role)["report"]
        count = RANKS[role]
        assert (report["description"]["tp"], report["description"]["pp"]) == (count, 2)
        ranks = report["ranks"]
        assert [rank["pid"] for rank in ranks[::count]] == [site.running[f"{role}-{rank}"].pid for rank in (0, 1)]
        places = [(True, host) for host in ("", "127.0.0.1") for _ in range(count)]
        assert [(rank["is_up"], rank["host"]) for rank in ranks] == places
        url = re.search(r"https://\S+/metrics", site.said[f"{role}-0"])
        assert url is not None
        page = urlopen(url[0], context=trusted).read().decode()
        assert re.findall(r"baton_rank_up{.*rank=\"(\d)\".*} 1\.0", page) == [f"{rank}" for rank in range(2 * count)]


def test_a_stream_goes_on_elsewhere_when_a_host_is_killed_and_the_node_comes_again(
    site: Site, wanted: list[int]
) -> None:
    site.start("plain", *site.plain_words("decode", "plain"))
    site.wait_until_ready("prefill-0", "decode-0", "plain")
    streams = site.during_two_streams(site.running["decode-1"].kill)
    assert [tokens for tokens, _ in streams] == [wanted, wanted]
    assert sorted((end.path.decode_node, end.path.attempts) for _, end in streams) == [("plain", 1), ("plain", 2)]
    assert site.ended("decode-1")[0] == -signal.SIGKILL
    code, last = site.ended("decode-0")
    assert code == 1
    assert re.fullmatch(r"baton: the engine died: rank 1 at 127\.0\.0\.1 has \w+ its connection.*", last)
    assert "Traceback" not in site.said["decode-0"]

    # The same commands start the node again. It ends as systemd and Kubernetes end it: all processes are told at once.
    site.start_node("decode")
    site.wait_until_ready("decode-0")

    def end_decode() -> None:
        for rank in (0, 1):
            site.running[f"decode-{rank}"].send_signal(signal.SIGTERM)

    streams = site.during_two_streams(end_decode)
    assert [tokens for tokens, _ in streams] == [wanted, wanted]
    # The stream of the node that ends moves to the other one, which is on one host.
    paths = sorted((end.path.decode_node, end.path.attempts, end.path.reason) for _, end in streams)
    assert [path[:2] for path in paths] == [("plain", 1), ("plain", 2)]
    assert paths[1][2] == MOVED.text
    assert [site.ended(f"decode-{rank}")[0] for rank in (0, 1)] == [0, 0]


def test_the_other_host_ends_when_the_first_one_is_killed(site: Site) -> None:
    site.wait_until_ready("prefill-0")
    site.running["prefill-0"].kill()
    assert site.ended("prefill-0")[0] == -signal.SIGKILL
    code, last = site.ended("prefill-1")
    assert code == 5
    assert last.startswith("baton: the node's first host is gone: the leader has ")
    assert "Traceback" not in site.said["prefill-1"]


def test_a_host_that_does_not_belong_to_the_node_says_why(site: Site) -> None:
    site.start("another-0", *site.node_words("decode", 0, "another"))
    site.line_from("another-0", "waits for this node's other hosts")
    said = site.shell.baton(*site.node_words("decode", 1, "another", certificate="router"))
    assert said.returncode == 78
    assert said.stderr.splitlines()[-1].startswith(
        "baton: the node's first host refused this one: the certificate is not that of a node of the cluster"
    )
    said = site.shell.baton(*site.node_words("decode", 1, "another", model="other"))
    assert said.returncode == 78
    assert re.search(
        r"baton: the model in \S+/other has the fingerprint .*: give all hosts the same files$", said.stderr
    )
    code, last = site.ended("another-0")
    assert code == 78
    assert "rank 1 at 127.0.0.1 has failed: the model in" in last


@pytest.mark.parametrize(("rank", "missing"), [(0, "waits for this node's other hosts"), (1, "the node's first host")])
def test_ctrl_c_ends_a_host_that_waits_for_another_one(site: Site, rank: int, missing: str) -> None:
    site.start("waiting", *site.node_words("decode", rank, "another"))
    line = site.line_from("waiting", missing)
    site.running["waiting"].send_signal(signal.SIGINT)
    assert site.ended("waiting") == (130, line.rstrip("\n"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--hosts 2 --host-rank 2 --first-host 127.0.0.1:9", "host_rank is 2, but the hosts of this node are 0 to 1"),
        ("--hosts 2 --host-rank 1", "needs --first-host HOST:PORT"),
        ("--hosts 2", "needs --first-host HOST:PORT"),
        ("--hosts 2 --host-rank 1 --first-host 127.0.0.1:9 --pp 3", "not in 3: leave --pp out"),
        ("--hosts 2 --host-rank 1 --first-host 127.0.0.1:9 --runner simulated", "leave --hosts out"),
        ("--hosts 2 --host-rank 1 --first-host 192.0.2.1:9", "192.0.2.1 is another machine: give --tls-cert"),
    ],
)
def test_settings_with_which_hosts_can_not_compute_together_are_refused(
    shell: Shell, model: Path, flags: str, said: str
) -> None:
    common = ("node", "--role", "decode", "--registry", "redis://127.0.0.1:1", "--model", model)
    assert said in refusal(shell.baton(*common, *flags.split()), 78)
