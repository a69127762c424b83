"""The messages of a call for vectors between clients and routers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from baton.messages.pooling import Pooling


class EmbedTask(enum.Enum):
    """What is made of each input."""

    EMBED = "embed"
    """Its embedding."""
    CLASSIFY = "classify"
    """A number for each label of the model's classification head."""
    SCORE = "score"
    """One number for a pair of texts: of a classifier with one label that label's, otherwise the cosine of both
    embeddings."""

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class EmbedInput:
    """One input of a call."""

    prompt: str | Sequence[int] | None
    """A text, or its token ids."""
    second_text: str | None = None
    """The second text of a pair; None: the input is no pair."""


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """A client's call as it arrived, before any check. None stands for an absent field."""

    inputs: Sequence[EmbedInput]
    task: EmbedTask = EmbedTask.EMBED
    pooling: Pooling | None = None
    """What an embedding is made of: last, cls or mean; None: as the model makes it."""
    normalize: bool | None = None
    dimensions: int | None = None
    activate: bool | None = None
    """Whether the outputs of a classification head become probabilities; None: they do."""
    truncate_prompt_tokens: int | None = None
    request_id: str = ""
    model: str = ""
    priority: int = 0
    cache_salt: str = ""
    traceparent: str = ""
    """W3C trace context of the client, as received: not checked."""


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """What was made of one input."""

    values: Sequence[float]
    """The embedding, a number for each label, or one score."""
    label: str = ""
    """The label with the largest number, of a classification."""


@dataclass(frozen=True, slots=True)
class EmbedResponse:
    """The results of a call, one for each input."""

    request_id: str
    results: Sequence[EmbedResult]
    prompt_tokens: int
    """Tokens of all inputs."""
