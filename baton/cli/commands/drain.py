"""`baton drain`: a node's work ends, and none follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.ask_routers import router_addresses
from baton.cli.output import VERSION, Format, fine_duration, print_json, print_text, print_yaml
from baton.cli.steering import Deadline, NodesArgument, ProgressLine, TimeoutOption
from baton.cli.target import OperatorAddressOption, RunDirOption
from baton.errors import BatonError, DeadlineExceeded, Unreachable

if TYPE_CHECKING:
    from baton.messages.steering import DrainProgress


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(drain)


def drain(
    nodes: NodesArgument,
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    stop: Annotated[bool, typer.Option("--stop", help="End the node's process when it is idle.")] = False,
    timeout: TimeoutOption = None,
    output: Annotated[Format, typer.Option("-o", "--output", help="Output format.")] = Format.TEXT,
) -> None:
    """Cordon nodes, one after the other, and wait until nothing of a request is left there.

    They are idle then and stay cordoned, also when they start again: `baton uncordon` lets them in. Exit code 6 when it
    takes longer than --timeout.
    """
    deadline = Deadline(timeout)
    done = []
    for name in nodes:
        line, began = ProgressLine(), deadline.elapsed_s
        try:
            last = _drain(name, address, run_dir, deadline, line, stop=stop)
        finally:
            line.clear()
        seconds = deadline.elapsed_s - began
        said = {"name": name, "drained": True, "stopped": last.stopped, "seconds": round(seconds, 3)}
        done.append(said | {"quarantined_blocks": last.quarantined_blocks})
        if output is Format.TEXT:
            but = f"; gave up on {remaining_work(last)}, whose reads do not end" if last.quarantined_blocks else ""
            print_text(f"{name} {'stopped' if last.stopped else 'drained'} after {fine_duration(seconds)}{but}")
    found: dict[str, Any] = {"version": VERSION, "nodes": done}
    if output is Format.JSON:
        print_json(found)
    elif output is Format.YAML:
        print_yaml(found)


def _drain(
    name: str, address: str | None, run_dir: Path | None, deadline: Deadline, line: ProgressLine, *, stop: bool
) -> DrainProgress:
    """Follow one node to its end, from router to router should they end. Raises DeadlineExceeded, NodeNotFound, ..."""
    from baton.client import OperatorClient

    last: DrainProgress | None = None
    trouble: BatonError | None = None
    places: Sequence[str] = []
    while True:
        if not places:
            if trouble is not None:
                raise trouble
            places = router_addresses(address, run_dir)
        client = OperatorClient(places[0])
        try:
            for last in client.drain(name, stop=stop, timeout_s=deadline.remaining_s):
                # It gets on: every router may be asked once more.
                trouble = None
                line.show(f"{name}: {remaining_work(last)}")
            if last is not None:
                return last
        except DeadlineExceeded:
            raise _too_long(name, last, deadline) from None
        except Unreachable as error:
            trouble = trouble or error
        finally:
            client.close()
        places = places[1:]


def _too_long(name: str, last: DrainProgress | None, deadline: Deadline) -> DeadlineExceeded:
    how = remaining_work(last) if last is not None else "an unknown number of requests"
    return DeadlineExceeded(
        f"after {deadline.timeout_s:g} s {name} still has {how}: it stays cordoned; wait on with `baton drain`, "
        "or let it go with `baton uncordon`"
    )


def remaining_work(progress: DrainProgress) -> str:
    """What is left, in words."""
    words = {
        "running": "running",
        "waiting": "waiting",
        "leased_blocks": "leased blocks",
        "quarantined_blocks": "quarantined blocks",
    }
    found = [f"{count} {words[key]}" for key, count in asdict(progress).items() if key in words and count]
    if not found and progress.in_flight:
        found = [f"{progress.in_flight} on their way"]
    return ", ".join(found) or "nothing left" + ("" if progress.idle else ", other routers are yet to know")
