"""`baton get requests` and `baton describe request`: running requests, and the latest that have ended."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.ask_routers import ask_about_request, ask_all_routers
from baton.cli.output import (
    Format,
    ListFormat,
    ListOutputOption,
    NoHeadersOption,
    OutputOption,
    fine_duration,
    print_document,
    print_list,
    print_note,
    print_text,
    size,
)
from baton.cli.target import (
    ANSWER_TIMEOUT_S,
    EachAnswerTimeoutOption,
    OperatorAddressOption,
    RunDirOption,
    cluster_flag,
)
from baton.cli.views.request_rows import ENDED_STATES, brief_ms
from baton.cli.views.watching import WatchedItem, WatchOption, watch
from baton.errors import RequestNotFound, UsageError

if TYPE_CHECKING:
    from baton.client import OperatorClient
    from baton.messages.operator import RequestRow

_COLUMNS = ["REQUEST", "STATE", "AGE", "PREFILL", "DECODE", "PROMPT", "OUTPUT", "ATTEMPTS", "TTFT"]
_WIDE = ["ROUTER", "TOTAL", "KV", "DETAIL"]
_SORTS = ("age", "state", "request", "output", "ttft", "attempts")


def requests(
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    running: Annotated[bool, typer.Option("--running", help="Only requests that have not ended.")] = False,
    limit: Annotated[
        int,
        typer.Option(
            help="Largest number of running requests, and of ended ones, from each router.", min=1, metavar="N"
        ),
    ] = 100,
    watching: WatchOption = False,
    sort_by: Annotated[str, typer.Option(help=f"Sort key: {', '.join(_SORTS)}.", metavar="KEY")] = "age",
    no_headers: NoHeadersOption = False,
    timeout: EachAnswerTimeoutOption = ANSWER_TIMEOUT_S,
    output: ListOutputOption = ListFormat.TABLE,
) -> None:
    """List the running requests and the latest that have ended, without their text.

    With -w a request is printed again when its state changes. With both -w and --running, requests that had ended
    before are left out.
    """
    if sort_by not in _SORTS:
        raise UsageError(f"--sort-by {sort_by}: use {', '.join(_SORTS)}")
    wide = output is ListFormat.WIDE
    columns = _COLUMNS + (_WIDE if wide else [])

    def fetch(known: Collection[str]) -> list[WatchedItem]:
        found, _ = requests_of_all_routers(address, run_dir, limit, timeout)
        rows = sorted(found, key=_sort_key(sort_by))
        every = [watched_item(row, wide=wide) for row in rows]
        return [
            each
            for each, row in zip(every, rows, strict=True)
            if not running or row.state not in ENDED_STATES or each.key in known
        ]

    if watching:
        watch(fetch, columns, output, headers=not no_headers, retries=address is not None)
    found, problems = requests_of_all_routers(address, run_dir, limit, timeout)
    rows = sorted((row for row in found if not (running and row.state in ENDED_STATES)), key=_sort_key(sort_by))
    documents, cells = (asdict(row) for row in rows), (_cells(row, wide) for row in rows)
    print_list(output, documents, (row.request_id for row in rows), columns, cells, headers=not no_headers)
    for problem in problems:
        print_note(f"baton: {problem}")


def watched_item(row: RequestRow, *, wide: bool) -> WatchedItem:
    """A request for -w. Another age or another number of tokens is no change."""
    state = replace(row, age_s=0.0, output_tokens=0)
    return WatchedItem(f"{row.request_id} {row.router}", state, _cells(row, wide), asdict(row))


def request(
    request_id: Annotated[str, typer.Argument(help="Id of the request.", metavar="REQUEST")],
    run_dir: RunDirOption = None,
    address: OperatorAddressOption = None,
    timeout: EachAnswerTimeoutOption = ANSWER_TIMEOUT_S,
    output: OutputOption = Format.TEXT,
) -> None:
    """Show where a request is, its progress, and how it ended."""

    def find(router: OperatorClient) -> RequestRow:
        rows = router.requests(1, request_id, timeout)
        if not rows:
            raise RequestNotFound(f"the router knows no request {request_id[:80]!r}: it remembers only the latest ones")
        return rows[0]

    row = ask_about_request(address, run_dir, find)
    if output is not Format.TEXT:
        print_document(output, asdict(row))
    else:
        for line in request_lines(row, cluster_flag(address, run_dir)):
            print_text(line)


def request_lines(row: RequestRow, where: str = "") -> Sequence[str]:
    """The details of one request as lines of text; `where` ends the commands in them, as `cluster_flag` returns it."""
    fields = [
        ("Request", row.request_id),
        ("State", f"{row.state}{f' ({row.detail})' if row.detail else ''}"),
        ("Arrived", f"{fine_duration(row.age_s)} ago, to {row.router}"),
        ("Prefill node", row.prefill_node or "none: the decode node computes the prompt, or the request waits"),
        ("Decode node", row.decode_node or "none yet"),
        ("Attempts", str(row.attempts)),
        ("Tokens", f"{row.prompt_tokens} of the prompt, {row.output_tokens} generated"),
        ("First token", "none yet" if row.ttft_ms is None else f"after {brief_ms(row.ttft_ms)}"),
    ]
    if row.total_ms is not None:
        fields.append(("End", f"after {brief_ms(row.total_ms)}"))
        fields.append(("KV moved", size(row.kv_bytes) if row.kv_bytes else "none"))
    width = max(len(name) for name, _ in fields) + 1
    hints = [f"Where its time was spent: baton trace {row.request_id}{where}"] if row.state in ENDED_STATES else []
    hints.append(f"Why it was placed there: baton explain {row.request_id}{where}")
    return [*(f"{name + ':':{width}}   {value}" for name, value in fields), "", *hints]


def requests_of_all_routers(
    address: str | None, run_dir: Path | None, limit: int, timeout_s: float
) -> tuple[list[RequestRow], list[str]]:
    """The requests of all routers, and the errors of those that did not answer. Raises Unreachable if none did."""
    answers, problems = ask_all_routers(address, run_dir, lambda router: router.requests(limit, timeout_s=timeout_s))
    return [row for rows in answers for row in rows], problems


def _sort_key(sort_by: str) -> Any:
    """The sort key of a row. Running requests come first."""
    never = float("inf")

    def key(row: RequestRow) -> tuple[bool, Any]:
        values = {
            "age": row.age_s,
            "state": row.state,
            "request": row.request_id,
            "output": -row.output_tokens,
            "ttft": -(row.ttft_ms if row.ttft_ms is not None else never),
            "attempts": -row.attempts,
        }
        return (row.state in ENDED_STATES, values[sort_by])

    return key


def _cells(row: RequestRow, wide: bool) -> Sequence[str]:
    cells = [
        row.request_id,
        row.state,
        fine_duration(row.age_s),
        row.prefill_node or "-",
        row.decode_node or "-",
        str(row.prompt_tokens),
        str(row.output_tokens),
        str(row.attempts),
        "-" if row.ttft_ms is None else brief_ms(row.ttft_ms),
    ]
    if not wide:
        return cells
    total = "-" if row.total_ms is None else brief_ms(row.total_ms)
    return [*cells, row.router, total, size(row.kv_bytes) if row.kv_bytes else "-", row.detail or "-"]
