"""`baton explain`: shows why a request was placed on its nodes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.ask_routers import ask_about_request
from baton.cli.output import Format, OutputOption, fine_duration, print_document, print_table, print_text, size
from baton.cli.target import ANSWER_TIMEOUT_S, AnswerTimeoutOption, OperatorAddressOption, RunDirOption

if TYPE_CHECKING:
    from baton.messages.operator import PlacementDecision, PlacementOutcome, PlacementWay

_COLUMNS = [
    *("", "PREFILL", "DECODE", "COST", "QUEUE", "CACHED", "PREFILL-MS", "HANDOFF", "DECODE-MS", "STALL", "TPOT"),
    "TOK/STEP",
]


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(explain)


def explain(
    request: Annotated[str, typer.Argument(help="Id of the request.", metavar="REQUEST")],
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    timeout: AnswerTimeoutOption = ANSWER_TIMEOUT_S,
    output: OutputOption = Format.TEXT,
) -> None:
    """Explain the placement of a request: the predicted cost of each candidate (ms), and which would have been best.

    A router remembers the last few thousand requests. `*` marks the candidate that was chosen.
    """
    decisions = ask_about_request(address, run_dir, lambda router: router.explain(request, timeout))
    if output is not Format.TEXT:
        print_document(output, {"request_id": request, "decisions": [asdict(decision) for decision in decisions]})
    else:
        for decision in decisions:
            _print_decision(request, decision)


def _print_decision(request: str, decision: PlacementDecision) -> None:
    nodes = " and ".join(name for name in (decision.prefill_node, decision.decode_node) if name)
    print_text(f"{request}, attempt {decision.attempt}, {fine_duration(decision.age_s)} ago: {nodes}")
    print_text(f"  {decision.decision}, {decision.policy}: {decision.reason}; {decision.prompt_tokens} prompt tokens")
    if decision.continues_only_at:
        print_text(f"  the stream had begun, so only {decision.continues_only_at} could continue it")
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
