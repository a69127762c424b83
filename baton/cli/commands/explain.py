"""`baton explain` and `baton trace`: why a request was placed on its nodes, and where its time went."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.ask import ask_about_request
from baton.cli.output import (
    Format,
    OutputOption,
    fine_duration,
    print_document,
    print_result,
    print_table,
    print_text,
    size,
)
from baton.cli.target import ANSWER_TIMEOUT_S, AnswerTimeoutOption, OperatorAddressOption, RunDirOption

if TYPE_CHECKING:
    from baton.messages.operator import PlacementDecision, PlacementOutcome, PlacementWay, QueuePlace, Timeline


_COLUMNS = [
    *("", "PREFILL", "DECODE", "COST", "QUEUE", "CACHED", "PREFILL-MS", "HANDOFF", "DECODE-MS", "STALL", "TPOT"),
    "TOK/STEP",
]


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add one of the commands."""
    app.command(name, help=text)(explain if name == "explain" else trace)


def explain(
    request: Annotated[str, typer.Argument(help="Id of the request.", metavar="REQUEST")],
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    timeout: AnswerTimeoutOption = ANSWER_TIMEOUT_S,
    output: OutputOption = Format.TEXT,
) -> None:
    """Explain the placement of a request: the predicted cost of each candidate (ms), and which would have been best.

    Of one that waits: how many tenants come before its own. A router remembers the last few thousand requests. `*`
    marks the candidate that was chosen.
    """
    explanation = ask_about_request(address, run_dir, lambda router: router.explain(request, timeout))
    if output is not Format.TEXT:
        print_document(output, {"request_id": request, **asdict(explanation)})
        return
    for decision in explanation.decisions:
        _print_decision(request, decision)
    if explanation.waiting is not None:
        _print_waiting(request, explanation.waiting)


def _print_waiting(request: str, place: QueuePlace) -> None:
    print_text(f"{request} has waited {fine_duration(place.waited_s)}: {place.why}")
    before = f"{place.tenants_before} tenants come before its own, and {place.own_before} requests of its own before it"
    print_text(f"  {before}")
    print_text(f"  {_standing(place.tenant_counter, place.virtual_time)}")


def _standing(counter: float, virtual_time: float) -> str:
    return f"its tenant's counter was {counter:.0f}, that of a new tenant {virtual_time:.0f}"


def _print_decision(request: str, decision: PlacementDecision) -> None:
    nodes = " and ".join(name for name in (decision.prefill_node, decision.decode_node) if name)
    print_text(f"{request}, attempt {decision.attempt}, {fine_duration(decision.age_s)} ago: {nodes}")
    print_text(f"  {decision.decision}, {decision.policy}: {decision.reason}; {decision.prompt_tokens} prompt tokens")
    if decision.continues_only_at:
        print_text(f"  the stream had begun, so only {decision.continues_only_at} could continue it")
    if decision.tenant_counter is not None and decision.virtual_time is not None:
        print_text(f"  {_standing(decision.tenant_counter, decision.virtual_time)}")
    if decision.ways:
        print_text()
        print_table(_COLUMNS, [_row(way, decision) for way in decision.ways])
    if decision.outcome is not None:
        print_text()
        _print_outcome(decision.outcome)


def _print_outcome(outcome: PlacementOutcome) -> None:
    moved = f", {size(outcome.kv_bytes)} of KV in {outcome.transfer_ms:.1f} ms" if outcome.kv_bytes else ""
    prefill = f"prefill {outcome.prefill_ms:.1f} ms with {outcome.cached_tokens} tokens cached"
    print_text(f"  measured: queue {outcome.queue_ms:.1f} ms, {prefill}{moved}")
    print_text(f"  first token after {outcome.first_token_ms:.1f} ms")
    if outcome.best is not None:
        nodes = " and ".join(name for name in (outcome.best.prefill_node, outcome.best.decode_node) if name)
        print_text(f"  in hindsight: {nodes} ({outcome.best.total_ms:.1f} ms); regret {outcome.regret_ms:.1f} ms")


def _row(way: PlacementWay, decision: PlacementDecision) -> list[str]:
    chosen = (way.prefill_node, way.decode_node) == (decision.prefill_node, decision.decode_node)
    cached = str(way.cached_tokens)
    if way.pulled_tokens:
        cached += f" (pulls {way.pulled_tokens})"
    if way.prefill_node:
        cached += f"+{way.decode_cached_tokens}"
    times = (way.queue_ms, way.prefill_ms, way.handoff_ms, way.decode_ms, way.stall_ms, way.token_ms)
    queue, prefill, handoff, decode, stall, token = (f"{time:.1f}" for time in times)
    return [
        "*" if chosen else "",
        way.prefill_node or "-",
        way.decode_node,
        f"{way.total_ms:.1f}",
        queue,
        cached,
        prefill,
        handoff,
        decode,
        stall,
        token,
        f"{way.tokens_per_step:.2f}" if way.tokens_per_step else "-",
    ]


_LEAST_BAR, _MOST_BAR = 16, 60


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
    timeline = ask_about_request(address, run_dir, lambda router: router.timeline(request, timeout))
    print_result(output, to_json(timeline), waterfall(timeline, shutil.get_terminal_size().columns))


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
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
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
    if timeline.bit_exact is False:
        lines.append("  not bit-exact: the same request may get other tokens at other nodes")
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
