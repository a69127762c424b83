"""`baton up`, `down` and `demo`: start and stop a cluster on this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import typer

from baton.cli.cluster.emit import Emission
from baton.cli.cluster.run_dir import RunDir
from baton.cli.cluster.state import ClusterState
from baton.cli.options import LOG_FORMAT, VERBOSE, option, settings_command
from baton.cli.output import Format, OutputOption, print_document, print_result, print_table, print_text
from baton.cli.target import RunDirOption, run_dir_of, run_dir_path
from baton.cli.waiting import closing_line
from baton.config import Loaded, UpConfig
from baton.errors import DeadlineExceeded, UsageError

_Use = Literal["text", "chat", "vectors", "speech"]
"""What a model is for: it goes on with texts, answers chats, makes vectors alone, or writes down speech."""


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add one of the commands."""
    if name != "up":
        app.command(name, help=text)(down if name == "down" else demo)
        return
    more = (
        option(
            "run_dir",
            Path | None,
            None,
            help="Run directory of the cluster. Default: the one of this user.",
            metavar="DIR",
            parser=run_dir_path,
        ),
        option(
            "detach",
            bool,
            False,
            "-d",
            "--detach",
            help="Return when the cluster is ready, and keep it running in the background.",
        ),
        option(
            "emit",
            Emission | None,
            None,
            help="Start nothing, but write files with which this system runs the cluster.",
        ),
        option("emit_dir", Path, Path("baton-deploy"), help="Directory for these files.", metavar="DIR"),
        option("output", Format, Format.TEXT, "-o", "--output", help="Output format."),
        VERBOSE,
        LOG_FORMAT,
    )
    settings_command(app, name, text, UpConfig, _up, more)


def _up(
    loaded: Loaded[UpConfig],
    file: Path | None,
    run_dir: Path | None,
    detach: bool,
    emit: Emission | None,
    emit_dir: Path,
    output: Format,
    verbose: int,
    log_format: str | None,
) -> None:
    # These imports are slow, and the help does not need them.
    from baton.models.resolve import with_model_directory

    if emit is not None:
        from baton.cli.cluster.emit.write import write

        for path in write(emit, with_model_directory(loaded.config), file, emit_dir):
            print_text(str(path))
        return
    if loaded.config.is_across_hosts:
        raise UsageError(
            "`baton up` starts all processes on this machine: leave --prefill-hosts and --decode-hosts out, write the "
            "files for several hosts with --emit helm or slurm, or run `baton node --hosts` on each host"
        )
    from baton.cli.cluster.supervisor.run import run_cluster
    from baton.observe import logs

    level, form = logs.log_level(verbose, os.environ, "info"), logs.log_format(log_format, os.environ)
    logs.configure_logging(level, environ=os.environ, form=form, process="supervisor")
    directory = run_dir_of(run_dir)
    with closing_line("the cluster is not started, and no process of it is left"):
        config = with_model_directory(loaded.config)

        def show(state: ClusterState) -> None:
            _show(state, directory, output, detached=detach, use=_use_of(config))

        run_cluster(config, file, directory, show, detach=detach)


def _use_of(config: UpConfig) -> _Use:
    """What the model is for. The bundled one has a chat template, but writes Python whatever it is asked."""
    # These imports are slow, and the help does not need them.
    from baton.config.cluster import bundled_model_dir
    from baton.model_formats.encoder_decoders import encoder_decoder
    from baton.runner.model.pooling_files import read_pooling
    from baton.text.model_template import has_chat_template

    if config.runner != "torch":
        return "text"
    if not read_pooling(config.model).generates:
        return "vectors"
    model = encoder_decoder(config.model)
    if model is not None and model.source == "speech":
        return "speech"
    return "chat" if config.model != bundled_model_dir() and has_chat_template(config.model) else "text"


def _show(state: ClusterState, directory: RunDir, output: Format, *, detached: bool, use: _Use) -> None:
    if output is not Format.TEXT:
        print_document(output, state.to_json())
    else:
        rows = [
            [process.name, process.role, process.status, str(process.pid), process.address or "-"]
            for process in state.processes
        ]
        print_table(["NAME", "ROLE", "STATUS", "PID", "ADDRESS"], rows)
        print_text()
        for line in _lines_to_paste(state, directory, detached=detached, use=use):
            print_text(line)
    sys.stdout.flush()


def _lines_to_paste(state: ClusterState, directory: RunDir, *, detached: bool, use: _Use) -> list[str]:
    """The lines that say where the model is served, and what to try."""
    baton = shlex.quote(_baton())
    where = directory.flag
    prompt = "The capital of France is" if use == "chat" else "def fibonacci(n):"
    body = f'{{"text": "{prompt}", "samplingParams": {{"maxTokens": 32}}}}'
    method = "Generate"
    path, json_body = "completions", f'{{"prompt": "{prompt}", "max_tokens": 32}}'
    if use == "chat":
        path = "chat/completions"
        json_body = '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    if use == "vectors":
        path, method, json_body = "embeddings", "Embed", '{"input": "a text"}'
        body = '{"inputs": [{"text": "a text"}]}'
    stop = f"{baton} down{where}" if detached else "Ctrl-C"
    authority = shlex.quote(str(Path(state.certs) / "ca.crt"))
    scheme, curl, grpcurl = "http", "curl", "grpcurl -plaintext"
    if state.certs:
        scheme, curl, grpcurl = "https", f"curl --cacert {authority}", f"grpcurl -cacert {authority}"
    if state.needs_key:
        shown = ' -H "authorization: Bearer $BATON_API_KEY"'
        curl, grpcurl = curl + shown, grpcurl + shown
    site = f"{scheme}://{state.http_address}"
    base = f"{site}/v1"
    requests = [
        f"  {curl} {base}/{path} -H 'content-type: application/json' -d '{json_body}'",
        f"  {grpcurl} -d '{body}' {state.grpc_address} baton.v1.Generation/{method}",
    ]
    if use == "speech":
        requests = [f"  {curl} {base}/audio/transcriptions -F model={state.model} -F file=@speech.wav"]
    return [
        f"{state.model} is served on {', '.join(state.grpc_addresses)} (gRPC) and "
        f"{', '.join(f'{scheme}://{address}/v1' for address in state.http_addresses)} (OpenAI); "
        f"operators: {', '.join(state.operator_addresses)}",
        f"In a browser: {f'{site}/ (chat), ' if use == 'chat' else ''}{site}/ui (the cluster), {site}/docs (the API)",
        *([f"  {baton} chat{where}"] if use == "chat" else []),
        *([f"  {baton} generate '{prompt}'{where}"] if use in ("chat", "text") else []),
        f"  {baton} get nodes{where}",
        *requests,
        f"Logs are in {directory.logs}. {stop} stops it.",
    ]


def _baton() -> str:
    """The command `baton` as this user can type it."""
    script = Path(sys.executable).with_name("baton")
    program = shutil.which("baton")
    if program is not None and Path(program).resolve() == script.resolve():
        return "baton"
    return str(script) if script.exists() else "baton"


def down(
    run_dir: RunDirOption = None,
    timeout: Annotated[float, typer.Option(help="Longest time to wait, in seconds.", metavar="SECONDS", min=0)] = 60.0,
    force: Annotated[
        bool, typer.Option("--force", help="Stop all processes at once; running requests are lost.")
    ] = False,
    output: OutputOption = Format.TEXT,
) -> None:
    """Stop the cluster: wait until running requests have ended, then stop all processes."""
    directory = run_dir_of(run_dir)
    was_running = stop_cluster(directory, timeout, force=force)
    result = {"run_dir": str(directory.path), "was_running": was_running, "running": False}
    said = f"stopped the cluster in {directory.path}" if was_running else f"no cluster is running in {directory.path}"
    print_result(output, result, [said])


def stop_cluster(directory: RunDir, timeout_s: float, *, force: bool) -> bool:
    """Stop a cluster and wait until it has ended. Returns whether one was running. Raises DeadlineExceeded."""
    was_running = False
    # Two different signals, since the kernel merges pending signals with the same number.
    numbers = (signal.SIGTERM, signal.SIGINT) if force else (signal.SIGTERM,)
    try:
        for holder in directory.holders(timeout_s) if directory.exists() else ():
            was_running = True
            for number in numbers:
                with suppress(ProcessLookupError):
                    os.kill(holder, number)
    except TimeoutError:
        raise DeadlineExceeded(
            f"the cluster in {directory.path} is still draining after {timeout_s:g} s: "
            f"repeat {directory.command('down')} to wait longer, or stop it at once with "
            f"{directory.command('down --force')}"
        ) from None
    return was_running


def demo(
    model: Annotated[
        Path | None, typer.Option(help="What `baton up --model` takes. Default: the bundled model.", metavar="MODEL")
    ] = None,
) -> None:
    """Start a cluster, send it prompts, show how each was served, and stop it."""
    # These imports are slow, and the help does not need them.
    from baton.cli.demo_run import run_demo

    raise typer.Exit(run_demo(model))
