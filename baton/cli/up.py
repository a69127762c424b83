"""`baton up`: a cluster on this machine."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import typer

from baton.cli.options import config_flags, option
from baton.cli.output import Format, note, print_json, print_table, print_yaml, say
from baton.cli.run_dir import RunDir, default_run_dir
from baton.cli.state import ClusterState
from baton.cli.supervisor.cluster import ClusterPlan, ClusterSupervisor
from baton.cli.supervisor.daemon import serve_detached
from baton.cli.supervisor.plan import plan_nodes, plan_redis
from baton.cli.supervisor.preflight import check_up
from baton.cli.target import run_dir_of, run_dir_path
from baton.clock import SystemClock
from baton.config import Loaded, UpConfig
from baton.observe.logs import configure_logging, log_level
from baton.registry.embedded import EmbeddedRedis, embedded_redis


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    more = (
        option(
            "run_dir",
            Path | None,
            None,
            help="Directory of this cluster. Default: this user's own.",
            metavar="DIR",
            parser=run_dir_path,
        ),
        option("detach", bool, False, "-d", "--detach", help="Return when the cluster is ready; it runs on."),
        option("output", Format, Format.TEXT, "-o", "--output", help="Output format."),
        option("verbose", int, 0, "-v", "--verbose", count=True, help="Log more: -v, -vv.", show_default=False),
    )
    app.command(name, help=text)(config_flags(UpConfig, _up, more))


def _up(
    loaded: Loaded[UpConfig], file: Path | None, run_dir: Path | None, detach: bool, output: Format, verbose: int
) -> None:
    configure_logging(log_level(verbose, os.environ, "info"), environ=os.environ, process="supervisor")
    place = run_dir_of(run_dir)
    place.create()
    place.take()
    try:
        check_up(loaded.config)
        redis = None if loaded.config.registry else embedded_redis(place.path)
        plan = _plan(loaded.config, redis, file)
        place.clear_logs()
    except BaseException:
        place.release()
        raise

    def show(state: ClusterState) -> None:
        _show(state, place, output, detached=detach)

    def serve(report: Callable[[ClusterState], None]) -> None:
        notes = _PhaseNotes() if not detach and sys.stderr.isatty() else None
        _serve(plan, place, redis, report, notes)

    if detach:
        show(serve_detached(serve, place.log("supervisor")))
    else:
        serve(show)


def _plan(config: UpConfig, redis: EmbeddedRedis | None, file: Path | None) -> ClusterPlan:
    registry = redis.url if redis is not None else config.registry
    cores = len(os.sched_getaffinity(0))
    return ClusterPlan(
        cluster=config.cluster,
        model=config.model_name or config.model.resolve().name,
        dtype=config.dtype,
        first=[plan_redis(redis.command)] if redis is not None else [],
        others=plan_nodes(config, registry, cores, file),
        start_timeout_s=config.start_timeout_s,
        drain_s=config.drain_s,
    )


class _PhaseNotes:
    """Tells a person at a terminal why nothing seems to happen."""

    def __init__(self) -> None:
        self._phase = ""

    def __call__(self, state: ClusterState) -> None:
        before, self._phase = self._phase, state.phase
        if not before:
            note("Starting …")
        elif (before, state.phase) == ("ready", "draining"):
            note("Stopping: what runs may end first. Once more ends it at once.")


def _serve(
    plan: ClusterPlan,
    place: RunDir,
    redis: EmbeddedRedis | None,
    on_ready: Callable[[ClusterState], None],
    on_change: Callable[[ClusterState], None] | None,
) -> None:
    """Run the cluster to its end; the run directory is free afterwards."""

    async def run() -> None:
        await ClusterSupervisor(plan, place, SystemClock(), on_change or _ignore).run(on_ready)

    place.sign()
    try:
        asyncio.run(run())
    finally:
        if redis is not None:
            redis.remove_socket()
        place.release()


def _ignore(_state: ClusterState) -> None:
    pass


def _show(state: ClusterState, place: RunDir, output: Format, *, detached: bool) -> None:
    if output is Format.JSON:
        print_json(state.to_json())
    elif output is Format.YAML:
        print_yaml(state.to_json())
    else:
        rows = [
            [process.name, process.role, process.status, str(process.pid), process.address or "-"]
            for process in state.processes
        ]
        print_table(["NAME", "ROLE", "STATUS", "PID", "ADDRESS"], rows)
        say()
        for line in _lines_to_paste(state, place, detached=detached):
            say(line)
    sys.stdout.flush()


def _lines_to_paste(state: ClusterState, place: RunDir, *, detached: bool) -> list[str]:
    baton = shlex.quote(_baton())
    where = "" if place.path == default_run_dir(os.environ).absolute() else f" --run-dir {shlex.quote(str(place.path))}"
    body = '{"text": "def fibonacci(n):", "samplingParams": {"maxTokens": 32}}'
    json_body = '{"prompt": "def fibonacci(n):", "max_tokens": 32}'
    stop = f"{baton} down{where}" if detached else "Ctrl-C"
    return [
        f"{state.model} is served on {', '.join(state.grpc_addresses)} (gRPC) and "
        f"{', '.join(f'http://{address}/v1' for address in state.http_addresses)} (OpenAI); "
        f"operators: {', '.join(state.operator_addresses)}",
        f"  {baton} generate 'def fibonacci(n):'{where}",
        f"  {baton} get nodes{where}",
        f"  curl http://{state.http_address}/v1/completions -H 'content-type: application/json' -d '{json_body}'",
        f"  grpcurl -plaintext -d '{body}' {state.grpc_address} baton.v1.Generation/Generate",
        f"Logs are in {place.logs}. {stop} stops it.",
    ]


def _baton() -> str:
    """The command as this user can type it."""
    script = Path(sys.executable).with_name("baton")
    found = shutil.which("baton")
    if found is not None and Path(found).resolve() == script.resolve():
        return "baton"
    return str(script) if script.exists() else "baton"
