"""Whether and how an engine drafts tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

from baton.did_you_mean import did_you_mean
from baton.errors import ConfigError

Method = Literal["ngram", "grammar"]
"""Where drafts come from: the sequence's own text and its grammar (ngram), or its grammar alone (grammar)."""

MAX_DRAFTS = 64
"""The largest `SpeculationConfig.num_speculative_tokens`."""

MAX_LOOKUP = 32
"""The largest `SpeculationConfig.prompt_lookup_max`."""


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How an engine drafts tokens; the names are vLLM's. Raises ConfigError for a number out of bounds."""

    method: Method = "ngram"
    num_speculative_tokens: int = 16
    """The most drafts of one request in one step. Fewer are made where fewer have been right."""
    prompt_lookup_min: int = 3
    """The fewest tokens at a sequence's end that must have occurred before, for what followed them to be drafted."""
    prompt_lookup_max: int = 16
    """The most tokens by which an earlier place is compared; of several places the one with most in common is taken."""

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise ConfigError(f"method must be one of {', '.join(get_args(Method))}, not {self.method!r:.40}")
        for one in fields(self)[1:]:
            if type(getattr(self, one.name)) is not int:
                raise ConfigError(f"{one.name} must be a whole number, not {getattr(self, one.name)!r:.40}")
        if not 1 <= self.num_speculative_tokens <= MAX_DRAFTS:
            raise ConfigError(
                f"num_speculative_tokens must be from 1 to {MAX_DRAFTS}, not {self.num_speculative_tokens}"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max <= MAX_LOOKUP:
            raise ConfigError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) and prompt_lookup_max ({self.prompt_lookup_max}) must "
                f"be from 1 to {MAX_LOOKUP}, the first no larger than the second"
            )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The configuration in a JSON object, such as {"method": "ngram"}. Raises ConfigError."""
        try:
            given: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"is no JSON: {error}") from None
        if not isinstance(given, dict):
            raise ConfigError('must be a JSON object, such as {"method": "ngram"}')
        known = [one.name for one in fields(cls)]
        for name in given:
            if name not in known:
                raise ConfigError(f"has no key {name!r:.40}{did_you_mean(name, known)}; it has {', '.join(known)}")
        return cls(**given)
