"""Renders the screen of `baton top` as lines of styled text. Does no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from baton.cli.output import duration, fine_duration
from baton.cli.views.cluster_view import ClusterView
from baton.cli.views.request_rows import ENDED_STATES, brief_ms
from baton.cli.views.status_page import bar
from baton.messages.operator import NodeStatus
from baton.observe.terminal_text import shown_in_place

if TYPE_CHECKING:
    from baton.messages.operator import ClusterEvent, RequestRow

_HEALTH_STYLES = {"ok": "bold green", "degraded": "bold yellow", "unavailable": "bold red"}
_NODE_STYLES = {"Ready": "green", "Starting": "cyan", "Cordoned": "yellow", "Draining": "yellow", "Suspect": "yellow"}
_BAD = "red"
_HEADER = "bold"
_FULL, _NEARLY_FULL = 0.95, 0.8
_LONGEST_ID = 28
_LEAST_BAR, _MOST_BAR = 6, 30


@dataclass(frozen=True, slots=True)
class Screen:
    """The size of the terminal."""

    width: int
    height: int | None = None
    """In lines; None for any number."""


def top_lines(
    view: ClusterView, rows: Sequence[RequestRow], events: Sequence[ClusterEvent], now: float, screen: Screen
) -> list[Text]:
    """Lines with the health, the nodes, the running requests and the latest events.

    `events` are ordered by time, the oldest first; `now` is in seconds since the epoch. On a low
    screen the nodes get the lines that they need, and requests and events share what is left.
    """
    running = sorted((row for row in rows if row.state not in ENDED_STATES), key=lambda row: -row.age_s)
    health = [_health(view, len(running))]
    nodes = list(_nodes(view.nodes, screen.width))
    requests = list(_requests(running))
    recent = list(_events(list(reversed(events)), now))
    if screen.height is not None:
        room = screen.height - len(health) - 3
        nodes = _first(nodes, max(2, room - 4), "nodes")
        room -= len(nodes)
        share = max(2, room - min(len(recent), room // 2))
        requests = _first(requests, share, "requests")
        recent = _first(recent, max(0, room - len(requests)), "")
    lines = [*health, Text(), *nodes, Text(), *requests, Text(), *recent][: screen.height]
    for line in lines:
        line.plain = shown_in_place(line.plain)
        line.truncate(screen.width)
    return lines


def _health(view: ClusterView, running: int) -> Text:
    nodes = [node for node in view.nodes if node.role != "router"]
    ready = sum(node.status == "Ready" for node in nodes)
    waiting = sum(node.waiting for node in nodes)
    # Routers count all running requests, but list only the latest.
    running = max(running, sum(node.running for node in view.nodes if node.role == "router"))
    counts = f"   {ready}/{len(nodes)} nodes ready, {running} requests, {waiting} waiting at nodes"
    return Text.assemble(
        (f"{view.cluster}: ", _HEADER),
        (view.health, _HEALTH_STYLES.get(view.health, _BAD)),
        counts,
        (f"   {view.detail}" if view.detail else "", "yellow"),
    )


def _nodes(nodes: Sequence[NodeStatus], width: int) -> Iterator[Text]:
    name = max(len("NODE"), *(len(node.name) for node in nodes), 0)
    status = max(len("STATUS"), *(len(node.status) for node in nodes), 0)
    has_ranks = any(node.shape.num_ranks > 1 for node in nodes)
    shape = max(len("SHAPE"), *(len(str(node.shape)) for node in nodes)) if has_ranks else 0
    beside = name + status + 43 + (shape + 2 if has_ranks else 0)
    width_of_bar = min(max(width - beside, _LEAST_BAR), _MOST_BAR)
    head = f"{'NODE':{name}}  {'ROLE':7}  {'STATUS':{status}}  {'RUNNING':>7} {'WAITING':>7}  "
    last = f"  {'SHAPE':{shape}}" if has_ranks else ""
    yield Text(f"{head}{'KV':{width_of_bar}}    %  {'AGE':>6}{last}", _HEADER)
    for node in nodes:
        share = node.kv_usage
        style = _BAD if share >= _FULL else "yellow" if share >= _NEARLY_FULL else "green"
        has_cache = node.role != "router"
        yield Text.assemble(
            f"{node.name:{name}}  {node.role:7}  ",
            (f"{node.status:{status}}", _NODE_STYLES.get(node.status, _BAD)),
            f"  {node.running:7} {node.waiting:7}  ",
            (bar(share, width_of_bar) if has_cache else " " * width_of_bar, style),
            f" {100 * share:4.0f}" if has_cache else "    -",
            f"  {duration(node.age_s):>6}",
            f"  {node.shape if has_cache else '-'}" if has_ranks else "",
        )


def _requests(running: Sequence[RequestRow]) -> Iterator[Text]:
    """A line for each request. The end of a line is cut on a narrow screen, so the least important column is last."""
    name = min(max((len(row.request_id) for row in running), default=0), _LONGEST_ID)
    name = max(name, len("REQUEST"))
    head = f"{'REQUEST':{name}}  {'STATE':12}  {'AGE':>6}  {'PROMPT':>6} {'OUTPUT':>6}  {'TTFT':>6}  PATH"
    yield Text(head if running else "no requests run", _HEADER if running else "dim")
    for row in running:
        ttft = "-" if row.ttft_ms is None else brief_ms(row.ttft_ms)
        again = f" (attempt {row.attempts})" if row.attempts > 1 else ""
        path = " > ".join(node for node in (row.prefill_node, row.decode_node) if node) or "-"
        yield Text.assemble(
            f"{row.request_id[:name]:{name}}  ",
            (f"{row.state:12}", "yellow" if row.state in ("Waiting", "Retrying") else "cyan"),
            f"  {fine_duration(row.age_s):>6}  {row.prompt_tokens:6} {row.output_tokens:6}  {ttft:>6}  {path}",
            (again, "yellow"),
        )


def _events(latest: Sequence[ClusterEvent], now: float) -> Iterator[Text]:
    reason = max((len(event.reason) for event in latest), default=0)
    if latest:
        yield Text("     AGE  EVENT", _HEADER)
    for event in latest:
        style = "yellow" if event.severity == "Warning" else ""
        text = "  ".join(part for part in (f"{event.reason:{reason}}", event.subject, event.detail) if part)
        yield Text.assemble((f"{fine_duration(now - event.time):>8}  ", "dim"), (text, style))


def _first(lines: list[Text], count: int, what: str) -> list[Text]:
    """The first `count` lines. With `what`, the last of them says how many lines are left out."""
    if len(lines) <= count:
        return lines
    if not what:
        return lines[:count]
    kept = lines[: max(1, count - 1)]
    return [*kept, Text(f"... and {len(lines) - len(kept)} more {what}", "dim")]
