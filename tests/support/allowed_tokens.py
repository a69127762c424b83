"""Which tokens a matcher allows next."""

from __future__ import annotations

import numpy as np

from baton.text.constraints.grammar import GrammarMatcher, num_mask_words


def allowed_tokens(matcher: GrammarMatcher, vocab_size: int) -> list[int]:
    mask = np.full(num_mask_words(vocab_size), -1, dtype=np.int32)
    matcher.fill(mask)
    found: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return found
