"""What a drain may leave behind: hand-offs that nobody waits for, whose reads can't be cancelled and may never end."""

from __future__ import annotations

from collections.abc import Sequence

from baton.messages.node_report import HandoffSide, OpenHandoff

GIVE_UP_AFTER_S = 30.0
"""How long a drain waits for reads that nobody wants any more, once it waits for nothing else."""
_ONLY_READS_LEFT = frozenset({"SUSPECT", "QUARANTINED"})
"""States of leases and transfers that nobody waits for any more."""
_MAX_NAMED = 8


def only_reads_left(open_handoffs: Sequence[OpenHandoff]) -> bool:
    """Whether nobody waits for any of these hand-offs: their blocks are kept for reads alone."""
    return bool(open_handoffs) and all(handoff.state in _ONLY_READS_LEFT for handoff in open_handoffs)


def may_be_written(left: Sequence[OpenHandoff]) -> bool:
    """Whether reads may still write to blocks of this process, which nobody may then use as long as it lives."""
    return any(handoff.side is HandoffSide.READER for handoff in left)


def describe_left(left: Sequence[OpenHandoff]) -> str:
    """One line for operators: the number of blocks, and the oldest of the hand-offs that keep them."""
    oldest = sorted(left, key=lambda handoff: -handoff.age_s)
    named = [
        f"{block.attempt} {block.state} with {block.peer or 'nobody'}, {block.num_blocks} blocks, {block.age_s:.0f} s"
        for block in oldest[:_MAX_NAMED]
    ]
    more = [f"{len(left) - _MAX_NAMED} more"] if len(left) > _MAX_NAMED else []
    num_blocks = sum(handoff.num_blocks for handoff in left)
    return f"the drain gave up on {num_blocks} blocks whose reads do not end: {'; '.join([*named, *more])}"
