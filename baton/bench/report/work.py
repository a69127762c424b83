"""Kinds of work of nodes and stages of requests; each has the same colour in every plot of every report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from baton.bench.report.chart import COLOURS

_KNOWN = ("prefill", "decode", "mixed", "transfer", "queue")
_TRANSFERS = frozenset({"transfer", "pull", "read", "push"})


def colours(kinds: Iterable[str]) -> Mapping[str, str]:
    """The style sheet's class for each kind, in the order of the kinds; unknown kinds get the free colours."""
    given = list(dict.fromkeys(kinds))
    free = iter(range(len(given)))
    return {
        kind: f"w{_KNOWN.index(kind) if kind in _KNOWN else (len(_KNOWN) + next(free)) % COLOURS}" for kind in given
    }


def in_order(kinds: Iterable[str]) -> list[str]:
    """Sorts kinds: known ones first, in the order in which a request passes through them."""
    return sorted(set(kinds), key=lambda kind: (_KNOWN.index(kind) if kind in _KNOWN else len(_KNOWN), kind))


def has_prompt(kind: str) -> bool:
    """Whether the kind is a step that computes prompts or chunks of prompts."""
    return kind in ("prefill", "mixed")


def is_transfer(kind: str) -> bool:
    """Whether the kind transfers KV while steps are computed."""
    return kind in _TRANSFERS
