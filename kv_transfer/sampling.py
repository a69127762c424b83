"""Which blocks of a prompt are compared, where not all of them are: a rule that both sides know, without a counter."""

from __future__ import annotations

from baton.messages.ids import AttemptKey

SAMPLE_EVERY = 16


def is_digested(attempt: AttemptKey, index: int, every: int) -> bool:
    """Whether the block at this index of the prompt has a digest, where one in `every` has; 0: none.

    Other ones in every flight, so that a prefix that many share is looked at everywhere in the end.
    """
    return every > 0 and (index + attempt.flight) % every == 0
