"""Whether and how an engine drafts tokens, and how many of the drafts were right."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self, get_args

from baton.did_you_mean import did_you_mean
from baton.errors import ConfigError
from baton.values import value

Method = Literal["ngram", "grammar", "draft_model"]
"""Where drafts come from beside the sequence's grammar: its own text, nothing else, or a smaller model."""

MAX_DRAFTS = 64
"""The largest `SpeculationConfig.num_speculative_tokens`."""

MAX_LOOKUP = 32
"""The largest `SpeculationConfig.prompt_lookup_max`."""


MAX_MODEL_CHARS = 4096
"""The most characters of `SpeculationConfig.model`."""


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How an engine drafts tokens; the names are vLLM's. Raises ConfigError for a value out of bounds."""

    method: Method = "ngram"
    num_speculative_tokens: int = 16
    """The most drafts of one request in one step. Fewer are made where fewer have been right."""
    prompt_lookup_min: int = 3
    """The fewest tokens at a sequence's end that must have occurred before, for what followed them to be drafted."""
    prompt_lookup_max: int = 16
    """The most tokens by which an earlier place is compared; of several places the one with most in common is taken."""

    model: str = ""
    """What names the model that drafts, as --model does; it must have the tokens of the model that it drafts for."""
    quantization: Literal["off", "int8", "int4"] = "off"
    """Quantise the weights of the model that drafts while they are loaded."""

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise ConfigError(f"method must be one of {', '.join(get_args(Method))}, not {self.method!r:.40}")
        for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
            if type(getattr(self, name)) is not int:
                raise ConfigError(f"{name} must be a whole number, not {getattr(self, name)!r:.40}")
        if type(self.model) is not str or len(self.model) > MAX_MODEL_CHARS:
            raise ConfigError(
                f"model must be the name of a model or a directory, of at most {MAX_MODEL_CHARS} characters, not "
                f"{self.model!r:.40}"
            )
        if self.quantization not in ("off", "int8", "int4"):
            raise ConfigError(f"quantization must be one of off, int8, int4, not {self.quantization!r:.40}")
        if (self.method == "draft_model") != bool(self.model):
            raise ConfigError("the method draft_model needs a model, and no other method has one")
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
        """The configuration in a JSON object, such as {"method": "ngram"} or {"model": "small"}. Raises ConfigError."""
        try:
            given: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"is no JSON: {error}") from None
        if not isinstance(given, dict):
            raise ConfigError('must be a JSON object, such as {"method": "ngram"}')
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise ConfigError(f"has no key {name!r:.40}{did_you_mean(name, known)}; it has {', '.join(known)}")
        if "model" in given:
            given.setdefault("method", "draft_model")
        return cls(**given)

    def to_json(self) -> str:
        """The text from which `from_json` makes this configuration."""
        return json.dumps(asdict(self))


@value(frozen=True, slots=True)
class DraftCounts:
    """Counts of drafted tokens that were verified."""

    num_drafted: int = 0
    num_accepted: int = 0
    """The drafted tokens that are tokens of the output."""

    @property
    def num_rejected(self) -> int:
        """The drafted tokens that are not tokens of the output: they were wrong, or lie behind its end."""
        return self.num_drafted - self.num_accepted

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(self.num_drafted + other.num_drafted, self.num_accepted + other.num_accepted)


NO_DRAFTS = DraftCounts()
