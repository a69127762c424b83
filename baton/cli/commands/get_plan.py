"""`baton get plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from baton.cli.ask import ask_all_routers
from baton.cli.output import (
    ListFormat,
    ListOutputOption,
    NoHeadersOption,
    duration,
    print_list,
    print_note,
    print_table,
    print_text,
)
from baton.cli.target import ANSWER_TIMEOUT_S, EachAnswerTimeoutOption, OperatorAddressOption, RunDirOption
from baton.messages.operator import PlanReport

_COLUMNS = ["ROLE", "NODES", "WANTED", "PRESSURE", "WITH WANTED"]
_POOL_COLUMNS = ["POOL", "WANTED", "SERVE", "NEXT OUT"]
_MOVE_COLUMNS = ["NODE", "FROM", "TO", "STATE", "AGE", "TOOK", "WHY"]
_GROWTH_COLUMNS = ["POOL", "BEFORE", "AFTER", "STATE", "AGE", "TOOK", "WHY"]


def plan(
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    no_headers: NoHeadersOption = False,
    timeout: EachAnswerTimeoutOption = ANSWER_TIMEOUT_S,
    output: ListOutputOption = ListFormat.TABLE,
) -> None:
    """Show how many nodes of each role the planner wants, for which load, which nodes move, and which pools grow.

    PRESSURE is how busy the nodes of a role are with the load that is expected: 1 is all that they sustain. POOL lists
    what the scaler said last; NEXT OUT is the only node that can be taken away.
    """
    reports, problems = ask_all_routers(address, run_dir, lambda router: router.plan(timeout))
    leading = [report for report in reports if report.leads]
    print_list(
        output,
        (asdict(report) for report in leading),
        (report.mode for report in leading),
        _COLUMNS,
        (row for report in leading for row in roles_of(report)),
        headers=not no_headers,
    )
    if output in (ListFormat.TABLE, ListFormat.WIDE):
        for report in leading:
            _print_more(report)
    if not leading:
        modes = ", ".join(sorted({report.mode for report in reports}))
        print_note(f"baton: no router plans moves now (--planner {modes})")
    for problem in problems:
        print_note(f"baton: {problem}")


def roles_of(report: PlanReport) -> Iterator[Sequence[str]]:
    """A row for each role."""
    for role, count, wanted, pressure, then in (
        (
            *("prefill", report.prefill_nodes, report.wanted_prefill_nodes),
            *(report.prefill_pressure, report.wanted_prefill_pressure),
        ),
        (
            *("decode", report.decode_nodes, report.wanted_decode_nodes),
            *(report.decode_pressure, report.wanted_decode_pressure),
        ),
        (
            *("encode", report.encode_nodes, report.wanted_encode_nodes),
            *(report.encode_pressure, report.wanted_encode_pressure),
        ),
    ):
        if role == "encode" and not count:
            continue
        yield [role, str(count), str(wanted), f"{pressure:.2f}", f"{then:.2f}"]


def _print_more(report: PlanReport) -> None:
    print_text(f"\n{report.mode}: {report.reason}")
    load = f"{report.requests_per_s:.2f} requests/s of {report.prompt_tokens:.0f} and {report.output_tokens:.0f} tokens"
    print_text(f"expected: {load}; {report.attained:.1%} of the last minute's requests kept their targets")
    pools = [[pool.pool, str(pool.want), str(pool.have), pool.next_out or "-"] for pool in report.pools]
    moves = [
        [move.node, move.origin, move.to, move.state, duration(move.age_s), duration(move.took_s), move.reason]
        for move in report.moves
    ]
    growths = [
        [
            *(growth.pool, str(growth.before), str(growth.after), growth.state),
            *(duration(growth.age_s), duration(growth.took_s), growth.reason),
        ]
        for growth in report.growths
    ]
    for columns, rows in ((_POOL_COLUMNS, pools), (_MOVE_COLUMNS, moves), (_GROWTH_COLUMNS, growths)):
        if rows:
            print_text()
            print_table(columns, rows)
