"""Runs the demo: starts a cluster on this machine, sends several prompts at once, and shows how each was served.

It stops all processes that it started, also when it fails or is interrupted. Only after a failure the directory with
the logs of the processes stays. `--model smollm2` serves a model that was
trained to chat, and asks it questions; every other model that `baton up` serves works, too.
"""

from __future__ import annotations

import inspect
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from baton.cli.cluster.run_dir import RunDir
from baton.cli.output import print_table, size
from baton.cli.views.answer import Answer, tokens_per_second
from baton.cli.waiting import interrupts_deferred
from baton.client import GenerationClient
from baton.errors import BatonError, ExitCode
from baton.messages.generation import Finished, GenerateEvent, GenerateRequest
from baton.models.resolve import find_model
from baton.observe.terminal_text import shown
from baton.text.model_template import ModelTemplate, has_chat_template
from baton.text.tokenizer import Tokenizer

_MAX_TOKENS, _MAX_ANSWER_TOKENS = 48, 80
_TEMPERATURE, _TOP_P, _SEED = 0.7, 0.9, 7
_DISAGGREGATED = ("--placement", "least-loaded")
"""With this placement short prompts also use both kinds of nodes, which is what the demo shows."""
_LONG_PROMPT_CHARS = 4500
"""About 1,500 tokens: three steps of the prefill node."""


@dataclass(slots=True)
class DemoRequest:
    """One prompt and the answer to it so far."""

    title: str
    prompt: str
    """The prompt, or the question as people read it."""
    chat_tokens: Sequence[int] = ()
    """The question as the model's chat template writes it; empty for a plain prompt."""
    answer: Answer = field(default_factory=Answer)
    error: str = ""

    @property
    def done(self) -> bool:
        return bool(self.error) or self.answer.finished is not None


def prompts() -> list[DemoRequest]:
    """The prompts of the demo: three short ones, and one that takes several prefill steps."""
    source = inspect.getsource(textwrap)[:_LONG_PROMPT_CHARS]
    return [
        DemoRequest("a function", "def fibonacci(n):"),
        DemoRequest("a class", "class Stack:\n    def __init__(self):\n"),
        DemoRequest("a script", "import os\nimport sys\n\n\ndef main():\n"),
        DemoRequest("a long one", source[: source.rindex("\n") + 1]),
    ]


def questions(model_dir: Path) -> list[DemoRequest]:
    """Questions to a model that was trained to chat: three short ones, and one about a text of several steps."""
    text = inspect.getsource(textwrap)[:_LONG_PROMPT_CHARS]
    asked = {
        "a capital": "What is the capital of France?",
        "a reason": "Why is the sky blue? Answer in one sentence.",
        "a poem": "Write a short poem about the sea.",
        "a long one": f"{text[: text.rindex(chr(10))]}\n\nWhat does this Python module do? Answer in one sentence.",
    }
    tokenizer, runs = Tokenizer.load(model_dir), []
    with closing(ModelTemplate.load(model_dir)) as template:
        for title, question in asked.items():
            rendered = template.render([{"role": "user", "content": question}], datetime.now(UTC))
            runs.append(DemoRequest(title, question + "\n", tokenizer.encode_rendered(rendered)))
    return runs


def run_demo(model: Path | None) -> int:
    """Run the demo and return its exit code. `model`: what `baton up --model` takes; None: the bundled model.

    Raises BatonErrors: DemoFailed if the cluster does not start or a prompt fails, ConfigError for a model that is not
    served.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        # Set here, because a background job of a shell starts with SIGINT ignored.
        signal.signal(number, signal.default_int_handler)
    # Without markup: a model may write brackets.
    console = Console(highlight=False, markup=False, soft_wrap=not sys.stdout.isatty())
    try:
        runs = _requests(model)
        settings = [] if model is None else ["--model", str(model)]
        with _run_dir() as run_dir:
            with _cluster(run_dir.path, settings, console) as cluster:
                console.print(f"Sending {len(runs)} prompts at once.\n")
                _send(runs, cluster["grpc_address"], console)
                _show_summary(runs, console)
            if failed := [run for run in runs if run.error]:
                reason = f"{len(failed)} of {len(runs)} prompts failed; all processes are stopped"
                where = f", and their logs are in {run_dir.logs}" if _has_logs(run_dir) else ""
                raise DemoFailed(reason + where, ExitCode.FAILED)
    except KeyboardInterrupt:
        console.print("interrupted; all processes are stopped")
        return int(ExitCode.INTERRUPTED)
    console.print("All processes are stopped.")
    return int(ExitCode.OK)


def _requests(model: Path | None) -> list[DemoRequest]:
    """What the demo sends to a model, which is fetched and converted first if need be. Raises ConfigError."""
    if model is None:
        return prompts()
    directory = find_model(model, os.environ).directory
    return questions(directory) if has_chat_template(directory) else prompts()


class DemoFailed(BatonError):
    """A prompt failed, or the cluster of the demo did not start: then its exit code is that of `baton up`."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code = ExitCode(exit_code) if exit_code in list(ExitCode) else ExitCode.FAILED


@contextmanager
def _run_dir() -> Iterator[RunDir]:
    """A new run directory. It stays if the block fails when a process has written a log, which says why."""
    directory = RunDir(Path(tempfile.mkdtemp(prefix="baton-demo-")))
    try:
        yield directory
    except DemoFailed:
        if not _has_logs(directory):
            shutil.rmtree(directory.path)
        raise
    except BaseException:
        shutil.rmtree(directory.path)
        raise
    shutil.rmtree(directory.path)


def _has_logs(directory: RunDir) -> bool:
    return any(log.stat().st_size for log in directory.logs.glob("*.log"))


@contextmanager
def _cluster(run_dir: Path, settings: Sequence[str], console: Console) -> Iterator[dict[str, Any]]:
    """Run a cluster with these flags for the duration of the block, and yield its state."""
    console.print("Starting Redis, a router, a prefill node and a decode node …")
    started = time.monotonic()
    try:
        up = _baton(
            "up",
            "--detach",
            "--run-dir",
            str(run_dir),
            "--grpc-port",
            "0",
            "--http-port",
            "0",
            *_DISAGGREGATED,
            *settings,
            "-o",
            "json",
        )
        if up.returncode:
            reason = up.stderr.strip().removeprefix("baton: ")
            raise DemoFailed(reason or f"`baton up` ended with {up.returncode}", up.returncode)
        state = json.loads(up.stdout)
        _show_processes(state, time.monotonic() - started, console)
        yield state
    finally:
        # Signals that stop the demo must not keep it from stopping the cluster.
        handlers = [(number, signal.signal(number, signal.SIG_IGN)) for number in (signal.SIGINT, signal.SIGTERM)]
        down = _baton("down", "--run-dir", str(run_dir))
        for number, handler in handlers:
            signal.signal(number, handler)
        if down.returncode:
            console.print(down.stderr.strip())


def _baton(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "baton.cli.main", *words]
    # In a session of its own, since the demo handles Ctrl-C itself.
    process = None
    try:
        with interrupts_deferred(signal.SIGINT, signal.SIGTERM):
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env=_environment(),
            )
        out, err = process.communicate()
    except KeyboardInterrupt:
        if process is not None:
            process.send_signal(signal.SIGINT)
            process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _environment() -> dict[str, str]:
    """The environment without settings of this user, because the demo shows the defaults."""
    return {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}


def _send(runs: Sequence[DemoRequest], address: str, console: Console) -> None:
    """Send all prompts at once, each in a thread, and show the answers while they are generated."""
    news: queue.SimpleQueue[tuple[DemoRequest, GenerateEvent | str]] = queue.SimpleQueue()
    client = GenerationClient(address)

    def send(run: DemoRequest) -> None:
        if run.chat_tokens:
            request = GenerateRequest(prompt=run.chat_tokens, max_tokens=_MAX_ANSWER_TOKENS, temperature=0.0)
        else:
            request = GenerateRequest(
                prompt=run.prompt, max_tokens=_MAX_TOKENS, temperature=_TEMPERATURE, top_p=_TOP_P, seed=_SEED
            )
        ended = False
        try:
            for event in client.generate(request, timeout_s=120.0):
                news.put((run, event))
                ended = isinstance(event, Finished)
        except BatonError as error:
            news.put((run, str(error)))
        else:
            if not ended:
                news.put((run, "the stream ended before the end of the request"))

    threads = [threading.Thread(target=send, args=(run,), daemon=True) for run in runs]
    for thread in threads:
        thread.start()
    try:
        if console.is_terminal:
            with Live(_screen(runs, console), console=console, refresh_per_second=20) as live:
                for _ in _receive(runs, news):
                    live.update(_screen(runs, console))
        else:
            for run in _receive(runs, news):
                if run.done:
                    console.print(_plain(run))
    finally:
        client.close()


def _receive(
    runs: Sequence[DemoRequest], news: queue.SimpleQueue[tuple[DemoRequest, GenerateEvent | str]]
) -> Iterator[DemoRequest]:
    """Receive events until all requests are done. Yields the request that has changed, after each event."""
    while not all(run.done for run in runs):
        run, event = news.get()
        if isinstance(event, str):
            run.error = event
        else:
            run.answer.add(event)
        yield run


def _show_processes(state: dict[str, Any], seconds: float, console: Console) -> None:
    rows = [
        [process["name"], str(process["pid"]), process["address"] or "(private socket)"]
        for process in state["processes"]
    ]
    print_table(["PROCESS", "PID", "ADDRESS"], rows)
    console.print(f"Ready after {seconds:.1f} s, serving {shown(state['model'])}.\n")


def _screen(runs: Sequence[DemoRequest], console: Console) -> Group:
    lines = max(3, (console.height - 2) // len(runs) - 2)
    return Group(*(_panel(run, lines) for run in runs))


def _panel(run: DemoRequest, lines: int) -> Panel:
    body = Text(_tail(run.prompt, lines // 2), style="dim")
    body.append(shown(run.answer.text), style="bold" if not run.done else "")
    if run.error:
        body.append(shown(run.error), style="red")
    seen = Text("\n").join(body.split("\n")[-lines:])
    return Panel(seen, title=run.title, title_align="left", border_style="green" if run.done else "yellow")


def _plain(run: DemoRequest) -> str:
    if run.error:
        return f"--- {run.title}: {shown(run.error)}"
    return f"--- {run.title}\n{_tail(run.prompt, 3)}{shown(run.answer.text)}\n"


def _tail(prompt: str, lines: int) -> str:
    kept = prompt.split("\n")
    return prompt if len(kept) <= lines else "…\n" + "\n".join(kept[-lines:])


def _show_summary(runs: Sequence[DemoRequest], console: Console) -> None:
    """Print how each request was served, in 80 columns."""
    columns = ["PROMPT", "PREFILL", "COMPUTED", "KV MOVED", "IN", "DECODE", "TTFT", "TOKENS/S"]
    console.print()
    print_table(columns, [_row(run) for run in runs], gap=2)
    console.print()


def _row(run: DemoRequest) -> list[str]:
    end = run.answer.finished
    if end is None:
        return [run.title, "failed", *[""] * 6]
    return [
        run.title,
        end.path.prefill_node or "-",
        str(end.prompt_tokens - end.cached_tokens),
        size(end.kv_bytes),
        f"{end.transfer_ms:.1f} ms",
        end.path.decode_node,
        f"{end.ttft_ms:.0f} ms",
        f"{tokens_per_second(end):.0f}",
    ]
