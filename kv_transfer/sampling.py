"""Chooses which blocks of a prompt are compared where not all of them are, by a rule that both sides can evaluate."""

from __future__ import annotations

from baton.messages.ids import AttemptKey

SAMPLE_EVERY = 16
"""Where a sample is compared, it is one block in so many."""


def is_digested(attempt: AttemptKey, index: int, every: int) -> bool:
    """Whether the prompt's block `index` has a digest, where one block in `every` has; 0: none has.

    Each flight compares other blocks, so that in the end all blocks of a prefix that many requests share are compared.
    """
    return every > 0 and (index + attempt.flight) % every == 0
