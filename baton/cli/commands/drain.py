"""`baton drain`: cordons nodes and waits until their work has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.ask_routers import router_addresses
from baton.cli.output import Format, OutputOption, fine_duration, print_document, print_text
from baton.cli.steering import Deadline, NodesArgument, ProgressLine, TimeoutOption
from baton.cli.target import OperatorAddressOption, RunDirOption, cluster_flag
from baton.errors import BatonError, DeadlineExceeded, Unreachable

if TYPE_CHECKING:
    from baton.messages.operator import DrainProgress


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(drain)


def drain(
    nodes: NodesArgument,
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the process of the node when it is idle.")] = False,
    timeout: TimeoutOption = None,
    output: OutputOption = Format.TEXT,
) -> None:
    """Cordon nodes, one after the other, and wait until each has no requests and no leased blocks left.

    The nodes stay cordoned, even if they restart, until `baton uncordon`. The exit code is 6 if this takes longer than
    --timeout.
    """
    deadline = Deadline(timeout)
    done = []
    for name in nodes:
        line, started_s = ProgressLine(), deadline.elapsed_s
        try:
            last = _drain(name, address, run_dir, deadline, line, stop=stop)
        finally:
            line.clear()
        seconds = deadline.elapsed_s - started_s
        result = {"name": name, "drained": True, "stopped": last.stopped, "seconds": round(seconds, 3)}
        done.append(result | {"quarantined_blocks": last.quarantined_blocks})
        if output is Format.TEXT:
            left = f", but {remaining_work(last)} are left, because reads of them do not end"
            suffix = left if last.quarantined_blocks else ""
            print_text(f"{name} {'stopped' if last.stopped else 'drained'} after {fine_duration(seconds)}{suffix}")
    found: dict[str, Any] = {"nodes": done}
    if output is not Format.TEXT:
        print_document(output, found)


def _drain(
    name: str, address: str | None, run_dir: Path | None, deadline: Deadline, line: ProgressLine, *, stop: bool
) -> DrainProgress:
    """Follow the drain of one node, at the next router if one fails. Raises DeadlineExceeded or NodeNotFound."""
    from baton.client import OperatorClient

    last: DrainProgress | None = None
    failure: BatonError | None = None
    addresses: Sequence[str] = []
    while True:
        if not addresses:
            if failure is not None:
                raise failure
            addresses = router_addresses(address, run_dir)
        client = OperatorClient(addresses[0])
        try:
            for last in client.drain(name, stop=stop, timeout_s=deadline.remaining_s):
                # There was progress, so every router may be asked once more.
                failure = None
                line.show(f"{name}: {remaining_work(last)}")
            if last is not None:
                return last
        except DeadlineExceeded:
            raise _timeout_error(name, last, deadline, cluster_flag(address, run_dir)) from None
        except Unreachable as error:
            failure = failure or error
        finally:
            client.close()
        addresses = addresses[1:]


def _timeout_error(name: str, last: DrainProgress | None, deadline: Deadline, where: str) -> DeadlineExceeded:
    left = remaining_work(last) if last is not None else "an unknown number of requests"
    return DeadlineExceeded(
        f"after {deadline.timeout_s:g} s {name} still has {left}: it stays cordoned; repeat "
        f"`baton drain {name}{where}` to wait longer, or admit it again with `baton uncordon {name}{where}`"
    )


def remaining_work(progress: DrainProgress) -> str:
    """The work that is left, as text."""
    words = {
        "running": "running",
        "waiting": "waiting",
        "leased_blocks": "leased blocks",
        "quarantined_blocks": "quarantined blocks",
    }
    found = [f"{count} {words[key]}" for key, count in asdict(progress).items() if key in words and count]
    if not found and progress.in_flight:
        found = [f"{progress.in_flight} requests on their way"]
    return ", ".join(found) or "nothing left" + (
        "" if progress.idle else ", but other routers may not know of the cordon yet"
    )
