"""The kinds of work that a node does and a request goes through, each with one colour in every plot of every report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from baton.bench.report.chart import COLOURS

_KNOWN = ("prefill", "decode", "mixed", "transfer", "queue")
_MOVES = frozenset({"transfer", "pull", "read", "push"})


def colours(kinds: Iterable[str]) -> Mapping[str, str]:
    """The class of the style sheet for each kind, in the order of the kinds; unknown ones get what is free."""
    given = list(dict.fromkeys(kinds))
    free = iter(range(len(given)))
    return {
        kind: f"w{_KNOWN.index(kind) if kind in _KNOWN else (len(_KNOWN) + next(free)) % COLOURS}" for kind in given
    }


def in_order(kinds: Iterable[str]) -> list[str]:
    """Known kinds first, in the order in which a request meets them."""
    return sorted(set(kinds), key=lambda kind: (_KNOWN.index(kind) if kind in _KNOWN else len(_KNOWN), kind))


def has_prompt(kind: str) -> bool:
    """Whether it is a step that computes a prompt, or a piece of one."""
    return kind in ("prefill", "mixed")


def is_move(kind: str) -> bool:
    """Whether it moves KV beside the computing."""
    return kind in _MOVES
