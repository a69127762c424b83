"""`baton explain`: why a request went where it went."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.ask_routers import ask_about_request
from baton.cli.output import Format, fine_duration, print_json, print_table, print_text, print_yaml, size
from baton.cli.target import OperatorAddressOption, RunDirOption

if TYPE_CHECKING:
    from baton.messages.explanations import PlacementDecision, PlacementOutcome, PlacementWay

_COLUMNS = ["", "PREFILL", "DECODE", "COST", "QUEUE", "CACHED", "PREFILL-MS", "HANDOFF", "DECODE-MS", "STALL", "TPOT"]


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(explain)


def explain(
    request: Annotated[str, typer.Argument(help="The request's id.", metavar="REQUEST")],
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.", metavar="SECONDS", min=0)] = 5.0,
    output: Annotated[Format, typer.Option("-o", "--output", help="Output format.")] = Format.TEXT,
) -> None:
    """Say why a request went where it went: what each way was predicted to cost (ms), and what would have been best.

    A router remembers some thousand requests. `*` marks the way that was taken.
    """
    decisions = ask_about_request(address, run_dir, lambda router: router.explain(request, timeout))
    if output is Format.JSON:
        print_json({"request_id": request, "decisions": [asdict(decision) for decision in decisions]})
    elif output is Format.YAML:
        print_yaml({"request_id": request, "decisions": [asdict(decision) for decision in decisions]})
    else:
        for decision in decisions:
            _tell(request, decision)


def _tell(request: str, decision: PlacementDecision) -> None:
    where = " and ".join(name for name in (decision.prefill_node, decision.decode_node) if name)
    print_text(f"{request}, attempt {decision.attempt}, {fine_duration(decision.age_s)} ago: {where}")
    print_text(f"  {decision.decision}, {decision.policy}: {decision.reason}; {decision.prompt_tokens} prompt tokens")
    if decision.ways:
        print_text()
        print_table(_COLUMNS, [_row(way, decision) for way in decision.ways])
    if decision.outcome is not None:
        print_text()
        _tell_outcome(decision.outcome)


def _tell_outcome(outcome: PlacementOutcome) -> None:
    moved = f", {size(outcome.kv_bytes)} of KV in {outcome.transfer_ms:.1f} ms" if outcome.kv_bytes else ""
    prefill = f"prefill {outcome.prefill_ms:.1f} ms with {outcome.cached_tokens} tokens cached"
    print_text(f"  measured: queue {outcome.queue_ms:.1f} ms, {prefill}{moved}")
    print_text(f"  first token after {outcome.first_token_ms:.1f} ms")
    if outcome.best is not None:
        nodes = " and ".join(name for name in (outcome.best.prefill_node, outcome.best.decode_node) if name)
        print_text(f"  in hindsight: {nodes} ({outcome.best.total_ms:.1f} ms); regret {outcome.regret_ms:.1f} ms")


def _row(way: PlacementWay, decision: PlacementDecision) -> list[str]:
    taken = (way.prefill_node, way.decode_node) == (decision.prefill_node, decision.decode_node)
    cached = str(way.cached_tokens)
    if way.prefill_node:
        cached += f"+{way.decode_cached_tokens}"
    times = (way.queue_ms, way.prefill_ms, way.handoff_ms, way.decode_ms, way.stall_ms, way.token_ms)
    queue, prefill, handoff, decode, stall, token = (f"{time:.1f}" for time in times)
    return [
        "*" if taken else "",
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
    ]
