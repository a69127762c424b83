"""Models that rotate the positions of long sequences otherwise than those of short ones (LongRoPE: Ding et al. 2024).

Which angles a position has is a function of the request's prompt and of the position alone, as in transformers'
`generate()`: a prompt is computed with the angles of its length. For an output that outgrows the short angles there
are two rules, of which a model's own is found out when it is loaded: the positions behind the border have the angles of
long sequences and those before it keep theirs, or the sequence starts over as a long one (decision 51).
"""

from __future__ import annotations

from baton.values import value


@value(frozen=True, slots=True)
class LongSequences:
    """Which sequences of a model are long."""

    most_short: int
    """The most tokens of a short sequence."""
    starts_over: bool
    """Whether a short sequence that has grown beyond this is computed again, as a long one."""

    def is_long(self, num_prompt_tokens: int, num_tokens: int) -> bool:
        """Whether all positions of a sequence have the angles of long ones. `num_tokens`: with its output so far."""
        return (num_tokens if self.starts_over else num_prompt_tokens) > self.most_short

    def long_from(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """The first position of a sequence that has the angles of long ones."""
        return 0 if self.is_long(num_prompt_tokens, num_tokens) else self.most_short
