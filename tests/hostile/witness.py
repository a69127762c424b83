"""The observers of an attack: the metrics of the attacked processes, and well-behaved clients."""

from __future__ import annotations

import http.client
import json
import re
import ssl
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from baton.client import Access, GenerationClient
from baton.messages.generation import Chunk, Finished, GenerateRequest
from baton.text.bounded_workers import BOUNDED_CHILD

BOUND_S = 60.0
"""The longest wait for an answer, in seconds."""
CALM_S = 20.0
"""Within so many seconds after an attack everything must be as before."""
_PAUSE_S = 0.05
_SAMPLE = re.compile(r"^baton_(\w+)\{(.*)\} (\S+)$")
_HELD, _HELD_CPU = "event_loop_held_seconds", "event_loop_held_cpu_seconds"
_DESCRIPTORS = "process_open_fds"
_COUNTED = (_DESCRIPTORS, "event_loop_tasks", "grpc_calls", "grpc_connections", "http_connections")
MEMORY_GROWTH = 0.10
_PROMPT = [40 + number % 50 for number in range(40)]
NUM_TOKENS = 16


@dataclass(frozen=True)
class Page:
    """The metrics page of a process, with the headers and the TLS context for it."""

    address: str
    headers: Mapping[str, str]
    tls: ssl.SSLContext | None

    def connect(self) -> http.client.HTTPConnection:
        if self.tls is None:
            return http.client.HTTPConnection(self.address, timeout=BOUND_S)
        return http.client.HTTPSConnection(self.address, timeout=BOUND_S, context=self.tls)

    def reading(self) -> Reading:
        connection = self.connect()
        try:
            connection.request("GET", "/metrics", headers={**self.headers, "connection": "close"})
            answer = connection.getresponse()
            text = answer.read().decode()
            assert answer.status == 200, text
        finally:
            connection.close()
        found: dict[str, float] = {}
        for line in text.splitlines():
            if (sample := _SAMPLE.match(line)) is not None:
                labels = re.findall(r'\b(?:le|cause)="([^"]*)"', sample[2])
                found[" ".join((sample[1], *labels))] = float(sample[3])
        return Reading(found)


@dataclass(frozen=True)
class Reading:
    """The metrics of a process at one moment."""

    figures: Mapping[str, float]

    @property
    def memory(self) -> float:
        return self.figures["process_resident_memory_bytes"]

    def counts(self) -> dict[str, float]:
        """Return the counts that must return to their idle values."""
        return {name: self.figures[name] for name in _COUNTED if name in self.figures}

    def without_descriptors(self, number: int) -> Reading:
        """Return the same reading with `number` fewer open descriptors."""
        return Reading({**self.figures, _DESCRIPTORS: self.figures[_DESCRIPTORS] - number})

    def longest_since(self, before: Reading, *, cpu: bool) -> float:
        """Return a bound (seconds) for all turns of the loop between the two readings."""
        name = f"{_HELD_CPU if cpu else _HELD}_bucket"
        bounds = [key.partition(" ")[2] for key in self.figures if key.startswith(f"{name} ")]
        ordered = sorted(bounds, key=float)
        all_turns = f"{name} +Inf"
        longer = {
            bound: (self.figures[all_turns] - before.figures[all_turns])
            - (self.figures[f"{name} {bound}"] - before.figures[f"{name} {bound}"])
            for bound in ordered
        }
        return next(float(bound) for bound in ordered if longer[bound] == 0)

    def attempts(self) -> dict[str, float]:
        """Return the number of further attempts of requests, by cause."""
        return {
            key: value
            for key, value in self.figures.items()
            if key.startswith("request_attempts_total") and "first" not in key
        }


@dataclass
class Victim:
    """Two clients that repeat the same request over gRPC and over HTTP."""

    grpc_address: str
    page: Page
    """The router's HTTP port, with a client's key."""
    access: Access
    num_answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    expected: Mapping[str, object] = field(default_factory=dict)

    def start(self) -> None:
        """Record the answers of an undisturbed router."""
        self._client = GenerationClient(self.grpc_address, access=self.access)
        self.expected = {"grpc": self._over_grpc(), "http": self._over_http()}
        assert len(self.expected["grpc"]) == NUM_TOKENS  # type: ignore[arg-type]

    def have_schemas_compiled(self) -> None:
        """Send schemas from several clients at once: the processes that compile them stay for later ones."""
        shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}, "strict": True}}
        body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 2, "response_format": shape}
        threads = [threading.Thread(target=self._post, args=("/v1/chat/completions", body)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        self._client.close()

    def ask_until(self, over: threading.Event) -> None:
        """Repeat the requests until `over` is set, each at least once."""
        self.num_answers, self.wrong, self.longest_s = Counter(), [], 0.0
        threads = [threading.Thread(target=self._ask, args=(kind, over)) for kind in self.expected]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _ask(self, kind: str, over: threading.Event) -> None:
        ask = {"grpc": self._over_grpc, "http": self._over_http}[kind]
        while True:
            began = time.monotonic()
            try:
                got = ask()
                if got != self.expected[kind]:
                    self.wrong.append(f"{kind}: {got} instead of {self.expected[kind]}")
            except Exception as error:
                self.wrong.append(f"{kind}: {type(error).__name__}: {error}")
            self.num_answers[kind] += 1
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            if over.is_set() or self.wrong:
                return

    def _over_grpc(self) -> Sequence[int]:
        got: list[int] = []
        request = GenerateRequest(_PROMPT, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        for event in self._client.generate(request, timeout_s=BOUND_S):
            if isinstance(event, Chunk):
                got += event.token_ids
            elif isinstance(event, Finished):
                assert event.path.attempts == 1, event
        return got

    def _over_http(self) -> object:
        body = {"prompt": _PROMPT, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
        said = self._post("/v1/completions", body)
        events = [line.removeprefix("data: ") for line in said.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]", said
        chosen = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
        return "".join(choice["text"] for choice in chosen), chosen[-1]["finish_reason"]

    def _post(self, path: str, body: Mapping[str, object]) -> str:
        connection = self.page.connect()
        try:
            headers = {**self.page.headers, "content-type": "application/json", "connection": "close"}
            connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            said = answer.read().decode()
            assert answer.status == 200, said
            return said
        finally:
            connection.close()


@dataclass(frozen=True)
class Calm:
    """The state of all processes after an attack."""

    after: Mapping[str, Reading]
    left: Sequence[str]
    """What did not return to its earlier value in time."""
    waited_s: float
    waited_for: str
    """What returned last."""


class PeakMemory:
    """The most memory that a process has had, by the kernel's account (VmHWM of proc_pid_status(5))."""

    def __init__(self, pid: int) -> None:
        self._proc = Path("/proc") / str(pid)
        (self._proc / "clear_refs").write_text("5")  # from now on (proc_pid_clear_refs(5))

    def bytes(self) -> int:
        status = (self._proc / "status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))


class Watched:
    """The observed processes of a cluster."""

    def __init__(self, pages: Mapping[str, Page], pids: Mapping[str, int]) -> None:
        """`pages` and `pids` by the names of processes."""
        self._pages = pages
        self._pids = pids
        self._idle = self._settled()

    def read(self) -> dict[str, Reading]:
        return {name: page.reading().without_descriptors(self._children(name)) for name, page in self._pages.items()}

    def calm(self, before: Mapping[str, Reading]) -> Calm:
        """Wait until memory is as before and each count has been at its idle value once.

        Each count is checked on its own: nodes have short tasks now and then, while a leak never returns to its value.
        """
        began, waited_for = time.monotonic(), ""
        uncounted = {(name, what) for name, idle in self._idle.items() for what in idle.counts()}
        while True:
            now = self.read()
            uncounted = {
                (name, what) for name, what in uncounted if now[name].figures[what] > self._idle_count(name, what)
            }
            wrong = [
                f"{name}: {now[name].figures[what]:.0f} {what} instead of {self._idle_count(name, what):.0f}"
                for name, what in sorted(uncounted)
            ]
            wrong += [
                f"{name}: {now[name].memory / 1e6:.1f} MB instead of {before[name].memory / 1e6:.1f} MB"
                for name in now
                if now[name].memory > before[name].memory * (1 + MEMORY_GROWTH)
            ]
            waited_s = time.monotonic() - began
            if not wrong or waited_s > CALM_S:
                return Calm(now, wrong, waited_s, waited_for)
            waited_for = "; ".join(wrong)
            time.sleep(_PAUSE_S)

    def _children(self, name: str) -> int:
        """The number of children in which the process compiles schemas; it holds a descriptor for each.

        It starts one when as many schemas come at once and keeps it, so a child is nothing that an attack left behind.
        """
        found, argument = 0, b"\0".join((b"-m", BOUNDED_CHILD.encode(), str(self._pids[name]).encode()))
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                found += argument + b"\0" in (process / "cmdline").read_bytes()
        return found

    def _idle_count(self, name: str, what: str) -> float:
        return self._idle[name].figures[what]

    def _settled(self) -> dict[str, Reading]:
        """Return the first reading whose counts equal those of the next one."""
        seen = self.read()
        while True:
            time.sleep(10 * _PAUSE_S)
            again = self.read()
            if all(again[name].counts() == seen[name].counts() for name in seen):
                return again
            seen = again
