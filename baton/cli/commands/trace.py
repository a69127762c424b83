"""`baton trace`: shows where the time of a request was spent, stage by stage."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.ask_routers import ask_about_request
from baton.cli.output import Format, OutputOption, fine_duration, print_document, print_text, size
from baton.cli.target import ANSWER_TIMEOUT_S, AnswerTimeoutOption, OperatorAddressOption, RunDirOption

if TYPE_CHECKING:
    from baton.messages.operator import Timeline

_LEAST_BAR, _MOST_BAR = 16, 60


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(trace)


def trace(
    request: Annotated[str, typer.Argument(help="Id of the request.", metavar="REQUEST")],
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    timeout: AnswerTimeoutOption = ANSWER_TIMEOUT_S,
    output: OutputOption = Format.TEXT,
) -> None:
    """Show where the time of a request was spent. The stages add up to its time to first token and to its latency.

    A router remembers the last few thousand requests that have ended. `relay` is time between two processes, which
    neither of them measured.
    """
    found = ask_about_request(address, run_dir, lambda router: router.timeline(request, timeout))
    if output is not Format.TEXT:
        print_document(output, to_json(found))
    else:
        print_text("\n".join(waterfall(found, shutil.get_terminal_size().columns)))


def to_json(timeline: Timeline) -> dict[str, Any]:
    """The timeline as a JSON object, in nanoseconds, with the start of each stage."""
    stages = [
        {**asdict(stage), "start_ns": start} for stage, start in zip(timeline.stages, timeline.starts_ns, strict=True)
    ]
    return {**asdict(timeline), "stages": stages}


def waterfall(timeline: Timeline, columns: int) -> Sequence[str]:
    """The timeline as lines of text with bars, which fit in `columns` unless that is very few."""
    lines = [*_head(timeline), ""]
    rows = [("STAGE", "WHERE", "START-MS", "MS", "")]
    where_widths = [len(stage.where) for stage in timeline.stages]
    room = columns - max(where_widths, default=0) - len("transfer" + "START-MS" + "MS") - 16
    width = min(_MOST_BAR, max(_LEAST_BAR, room))
    is_before_first_token = True
    for stage, start in zip(timeline.stages, timeline.starts_ns, strict=True):
        if stage.after_first_token and is_before_first_token:
            rows.append(("- first token", "", _ms(start), "", _mark(start, timeline.total_ns, width)))
            is_before_first_token = False
        bar = _bar(start, stage.duration_ns, timeline.total_ns, width)
        rows.append((stage.name, stage.where, _ms(start), _ms(stage.duration_ns), bar))
    widths = [max(len(row[place]) for row in rows) for place in range(4)]
    for name, where, begins, lasts, bar in rows:
        line = f"{name:{widths[0]}}   {where:{widths[1]}}   {begins:>{widths[2]}}   {lasts:>{widths[3]}}   {bar}"
        lines.append(line.rstrip())
    return lines


def _head(timeline: Timeline) -> Sequence[str]:
    nodes = " and ".join(node for node in (timeline.prefill_node, timeline.decode_node) if node)
    where = f" by {nodes}" if nodes else ""
    attempts = f", attempt {timeline.attempts}" if timeline.attempts > 1 else ""
    ago = fine_duration(timeline.age_s)
    lines = [f"{timeline.request_id}: {timeline.state} ({timeline.detail}) {ago} ago{where}{attempts}"]
    cached = f" ({timeline.cached_tokens} cached)" if timeline.cached_tokens else ""
    tokens = f"{timeline.prompt_tokens} prompt tokens{cached}, {timeline.completion_tokens} output tokens"
    if timeline.draft_tokens:
        tokens += f" ({timeline.accepted_draft_tokens} of {timeline.draft_tokens} drafts right)"
    read = f"{size(timeline.kv_bytes)} of KV read in {_ms(timeline.kv_read_ns)} ms"
    lines.append(f"  {tokens}; {read}" if timeline.kv_bytes else f"  {tokens}")
    first = f"first token after {_ms(timeline.ttft_ns)} ms" if timeline.ttft_ns is not None else "no token"
    lines.append(f"  {first}, end after {_ms(timeline.total_ns)} ms")
    if timeline.trace_id:
        lines.append(f"  trace {timeline.trace_id}")
    return lines


def _bar(start_ns: int, duration_ns: int, total_ns: int, width: int) -> str:
    begin = min(width - 1, start_ns * width // max(1, total_ns))
    end = -(-(start_ns + duration_ns) * width // max(1, total_ns))
    return " " * begin + "█" * max(1, min(width, end) - begin)


def _mark(at_ns: int, total_ns: int, width: int) -> str:
    return " " * min(width - 1, at_ns * width // max(1, total_ns)) + "▏"


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.3f}"
