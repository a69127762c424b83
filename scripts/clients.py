"""Runs other projects' clients, unchanged and in pinned versions, against a cluster of one prefill and one decode node.

Each client has a program in scripts/real_clients, which uses it as its users do, prints a line `works: ...` for each
thing that does, and fails at the first that does not. It gets the router's address, the model's name and the model's
directory in BATON_URL, BATON_MODEL and BATON_MODEL_DIR. Every client is installed into an environment of its own in
build/clients. With --write the results become rows of the table of docs/clients.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from generated_parts import rendered

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from baton.models.resolve import find_model  # noqa: E402

BUILD = ROOT / "build" / "clients"
PROGRAMS = ROOT / "scripts" / "real_clients"
PAGE = ROOT / "docs" / "clients.md"
WORKS = "works: "
CLIENT_S = 600.0
"""Seconds that a client's program may take."""


@dataclass(frozen=True, slots=True)
class Client:
    """A client of another project. `packages`: exactly pinned, the client itself first."""

    name: str
    program: str
    packages: Sequence[str]

    @property
    def is_javascript(self) -> bool:
        """Whether the client runs on Node.js; the others run on Python."""
        return self.program.endswith(".mjs")

    @property
    def folder(self) -> Path:
        """Where the client is installed."""
        return BUILD / Path(self.program).stem


CLIENTS = (
    Client("openai-python", "openai_python.py", ("openai==3.54.0",)),
    Client("anthropic", "anthropic_python.py", ("anthropic==2.14.0",)),
    Client("litellm", "litellm_python.py", ("litellm==1.110.2",)),
    Client("langchain-openai", "langchain_openai_python.py", ("langchain-openai==1.7.4", "langchain==1.5.2")),
    Client("pydantic-ai", "pydantic_ai_python.py", ("pydantic-ai-slim[anthropic,openai]==2.68.0",)),
    Client("openai-agents", "openai_agents_python.py", ("openai-agents==0.24.0",)),
    Client("smolagents", "smolagents_python.py", ("smolagents[openai]==1.26.0",)),
    Client("crewai", "crewai_python.py", ("crewai==1.15.30",)),
    Client("instructor", "instructor_python.py", ("instructor==1.17.0",)),
    Client(
        "ai-sdk",
        "ai_sdk.mjs",
        (
            "ai@7.0.173",
            "@ai-sdk/openai-compatible@3.0.92",
            "@ai-sdk/openai@4.0.118",
            "@ai-sdk/anthropic@4.0.105",
            "zod@4",
        ),
    ),
    Client("llm", "llm_command.py", ("llm==0.36",)),
    Client("guidellm", "guidellm_command.py", ("guidellm==0.8.1",)),
    Client("aiperf", "aiperf_command.py", ("aiperf==0.13.0",)),
    Client("lm-eval", "lm_eval_command.py", ("lm-eval[api]==0.4.13", "transformers==5.23.0")),
)


@dataclass(frozen=True, slots=True)
class Served:
    """What a client needs to know of the running cluster."""

    url: str
    model: str
    model_dir: str

    def environment(self) -> dict[str, str]:
        """The environment of a client's program. Clients find neither Baton's code nor a proxy."""
        kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
        served = {"BATON_URL": self.url, "BATON_MODEL": self.model, "BATON_MODEL_DIR": self.model_dir}
        return {**kept, **served, "NO_PROXY": "127.0.0.1,localhost"}


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one client: what worked, and what failed, if something did."""

    client: Client
    worked: Sequence[str]
    failed: str = ""


def main() -> int:
    """Installs the clients, runs their programs, and prints the results; returns 1 if one failed."""
    options = _options()
    chosen = [client for client in CLIENTS if client.name in options.clients]
    installed = {client.name: "" if options.no_install else _install(client) for client in chosen}
    results = []
    with _cluster(options.model) as served:
        for client in chosen:
            _note(f"running {client.name}")
            failed = installed[client.name]
            results.append(Result(client, (), failed) if failed else _run(client, served))
            _print(results[-1])
    if options.write:
        page = PAGE.read_text()
        PAGE.write_text(rendered(page, "clients", {"results": _table(results, options.model, page)}))
    return int(any(result.failed for result in results))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/clients", description=__doc__)
    names = [client.name for client in CLIENTS]
    parser.add_argument(
        "clients", nargs="*", metavar="CLIENT", help=f"clients to run; default: all ({', '.join(names)})"
    )
    parser.add_argument("--model", default="smollm2", help="a chat model, as `baton up --model` takes it")
    parser.add_argument("--no-install", action="store_true", help="use what is installed in build/clients")
    parser.add_argument("--write", action="store_true", help="write the results into docs/clients.md")
    options = parser.parse_args()
    unknown = [name for name in options.clients if name not in names]
    if unknown:
        parser.error(f"there is no client {unknown[0]!r}; there are {', '.join(names)}")
    options.clients = options.clients or names
    return options


def _install(client: Client) -> str:
    """Installs a client; returns why that failed, or an empty text."""
    _note(f"installing {' '.join(client.packages)}")
    client.folder.mkdir(parents=True, exist_ok=True)
    try:
        if client.is_javascript:
            npm = shutil.which("npm")
            if npm is None:
                return "npm is not installed"
            _call([npm, "install", "--silent", "--no-audit", "--no-fund", *client.packages], client.folder)
        else:
            python = client.folder / "bin" / "python"
            if not python.exists():
                _call([sys.executable, "-m", "venv", str(client.folder)], BUILD)
            pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
            # torch is pinned: any other version would bring gigabytes of CUDA libraries.
            torch = BUILD / "constraints.txt"
            lines = (ROOT / "constraints.txt").read_text().splitlines()
            torch.write_text("".join(f"{line}\n" for line in lines if line.startswith("torch==")))
            _call([*pip, "-c", str(torch), *client.packages], BUILD)
    except subprocess.CalledProcessError as error:
        return f"could not be installed: {_last_line(error.stderr)}"
    return ""


def _call(command: Sequence[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)


@contextmanager
def _cluster(model: str) -> Iterator[Served]:
    """A cluster of one pair of nodes on free ports, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="baton-clients-") as folder:
        resolved = find_model(Path(model), os.environ)
        baton = [sys.executable, "-P", "-m", "baton.cli.main"]
        here = ["--run-dir", f"{folder}/run"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        ports = ["--grpc-port", "0", "--http-port", "0"]
        _note(f"starting a cluster with the model {model}")
        try:
            served = ["--model", str(resolved.directory), "--model-name", resolved.name]
            subprocess.run([*baton, "up", "--detach", *served, *ports, *here], env=environment, check=True)
            state = json.loads(Path(folder, "run", "cluster.json").read_text())
            yield Served(f"http://{state['http_address']}", resolved.name, str(resolved.directory.resolve()))
        finally:
            subprocess.run([*baton, "down", *here], env=environment, check=False)


def _run(client: Client, served: Served) -> Result:
    interpreter = shutil.which("node") if client.is_javascript else str(client.folder / "bin" / "python")
    if interpreter is None:
        return Result(client, (), "node is not installed")
    program = PROGRAMS / client.program
    if client.is_javascript:
        # Node.js resolves imports from the folder of the program.
        program = Path(shutil.copy(program, client.folder))
    started = time.monotonic()
    try:
        done = subprocess.run(
            [interpreter, str(program)],
            env=served.environment(),
            cwd=client.folder,
            capture_output=True,
            text=True,
            timeout=CLIENT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Result(client, (), f"it did not end within {CLIENT_S:g} s")
    (client.folder / "output.txt").write_text(done.stdout + done.stderr)
    _note(f"{client.name}: {time.monotonic() - started:.0f} s")
    worked = tuple(line.removeprefix(WORKS) for line in done.stdout.splitlines() if line.startswith(WORKS))
    if done.returncode or not worked:
        return Result(
            client,
            worked,
            f"{_last_line(done.stderr)} (all output: {(client.folder / 'output.txt').relative_to(ROOT)})",
        )
    return Result(client, worked)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it failed without a message"


def _print(result: Result) -> None:
    for line in result.worked:
        print(f"{result.client.name}: {line}")
    if result.failed:
        print(f"{result.client.name}: FAILED: {result.failed}", flush=True)


def _table(results: Sequence[Result], model: str, page: str) -> str:
    """The table of all clients. Those that were not run now keep their rows on the page."""
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| ")}
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    for result in results:
        lines = [*result.worked, *([f"**failed:** {result.failed}"] if result.failed else [])]
        cells = (result.client.name, ", ".join(result.client.packages), today, "; ".join(lines))
        rows[result.client.name] = f"| {' | '.join(cells)} |"
    kept = [rows[client.name] for client in CLIENTS if client.name in rows]
    head = [f"`scripts/clients --model {model}`:\n", "| client | version | date | what works |", "|---|---|---|---|"]
    return "\n".join([*head, *kept]) + "\n"


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
