"""Pooling: vectors are made of prompts, and nothing is generated. Names follow vLLM's.

At the end are the messages of a call for vectors, between clients and routers.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from baton.messages.node_model import Capability
from baton.values import value

Activation = Literal["softmax", "sigmoid", "identity"]


class Pooling(enum.Enum):
    """What the vector is made of."""

    LAST = "last"
    """The hidden state of the last token."""
    CLS = "cls"
    """The hidden state of the first token, [CLS] in models like BERT."""
    MEAN = "mean"
    """The mean of the hidden states of all tokens."""
    CLASSIFY = "classify"
    """The outputs of the model's classification head, a number for each label."""
    ALIGN = "align"
    """Where each token of a transcript begins, as the index of a row of the encoder, and behind them where the last one
    ends."""

    __hash__ = object.__hash__


EMBEDDING_KINDS = frozenset(Pooling) - {Pooling.CLASSIFY, Pooling.ALIGN}
"""The kinds that make an embedding."""


@value(frozen=True, slots=True)
class PoolingParams:
    """How the vector of one request is made: pooled, cut to `dimensions`, and then normalised."""

    kind: Pooling = Pooling.LAST
    normalize: bool = True
    """Whether an embedding is scaled to length 1 (L2)."""
    dimensions: int = 0
    """How many of an embedding's first numbers are kept; 0: all of them."""
    activate: bool = True
    """Whether the head's outputs become probabilities, as `ModelPooling.activation` says."""
    second_start: int = 0
    """Where the second text of a pair begins among the tokens, for models that tell the texts of a pair apart by token
    types; 0: all tokens are of the first type. Of an alignment: where the transcript begins."""
    num_rows: int = 0
    """How many of the encoder's rows are of the recording, in an alignment. The rows behind them are of silence that
    fills up the encoder's input."""

    @property
    def needs(self) -> Capability:
        """What a model must be able to do for it."""
        match self.kind:
            case Pooling.CLASSIFY:
                return Capability.CLASSIFY
            case Pooling.ALIGN:
                return Capability.ALIGN
            case _:
                return Capability.EMBED

    @property
    def is_plain(self) -> bool:
        """Whether it is the whole normalised vector of the last token, which nodes of earlier versions make whatever
        they are asked for."""
        return self.kind is Pooling.LAST and self.normalize and not self.dimensions

    @property
    def takes_all_rows(self) -> bool:
        """Whether hidden states before the last one are needed: a cache of keys and values has none, so the whole
        prompt is computed."""
        return self.kind in (Pooling.CLS, Pooling.MEAN)

    @property
    def first_row(self) -> int:
        """The position of the first row that an alignment needs: that of the token before the transcript, since each
        row attends to where the next token is spoken."""
        return self.second_start - 1


@value(frozen=True, slots=True)
class PoolingRequest:
    """The vector that a client asks for, unchecked. None stands for an absent field: the model decides."""

    kind: Pooling | None = None
    """None: an embedding, as the model makes it."""
    normalize: bool | None = None
    dimensions: int | None = None
    activate: bool = True
    second_start: int = 0
    """Where the second text of a pair, or a transcript, begins among the prompt's tokens; 0: there is none."""
    num_rows: int = 0
    """See `PoolingParams`."""


@dataclass(frozen=True, slots=True)
class ModelPooling:
    """What a model directory says of pooling."""

    default: Pooling = Pooling.LAST
    """How an embedding is made if the request does not say."""
    normalizes: bool = True
    """Whether it is scaled to length 1 if the request does not say."""
    is_matryoshka: bool = False
    """Whether the model was trained for embeddings that are cut (Kusupati et al. 2022, "Matryoshka Representation
    Learning")."""
    matryoshka_dimensions: tuple[int, ...] = ()
    """The lengths to which they may be cut; empty, for such a model: any length."""
    is_encoder: bool = False
    """Whether each token attends to those behind it, too."""
    generates: bool = True
    """Whether the model has a head for the next token: encoders and classifiers have none."""
    labels: tuple[str, ...] = ()
    """The labels of the classification head; empty: the model has none."""
    activation: Activation = "softmax"
    """What makes probabilities of the head's outputs."""
    has_token_types: bool = False
    """Whether the texts of a pair are told apart by token types."""
    first_position: int = 0
    """The position that an encoder gives to the first token."""
    max_length: int = 0
    """The most tokens of a text that an encoder takes; 0: as many as config.json says."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What a model of this kind can be asked to do."""
        can = {Capability.EMBED}
        if self.generates:
            can.add(Capability.GENERATE)
        if self.labels:
            can.add(Capability.CLASSIFY)
        if len(self.labels) < 2:
            # A score is the cosine of two vectors of an embedding model, or the only number of a classifier.
            can.add(Capability.SCORE)
        return frozenset(can)

    def why_not_cut(self, dimensions: int, size: int) -> str:
        """Why embeddings of `size` numbers can't be cut to `dimensions`; empty if they can."""
        if dimensions in (0, size):
            return ""
        if not self.is_matryoshka:
            return f"must be {size}, or left out: the model was not trained for embeddings that are cut"
        if self.matryoshka_dimensions and dimensions not in self.matryoshka_dimensions:
            return f"must be one of {', '.join(map(str, sorted(self.matryoshka_dimensions)))}"
        return "" if 1 <= dimensions <= size else f"must be 1 to {size}"


NO_POOLING_FILES = ModelPooling()
"""What a directory says that has nothing about pooling."""


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
