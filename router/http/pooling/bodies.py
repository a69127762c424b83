"""The bodies of /v1/embeddings, /classify, /score and /rerank.

Fields are OpenAI's and vLLM's, and for reranking those of Jina and Cohere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator

from baton.errors import InvalidRequest
from baton.messages.pooling import Pooling, PoolingRequest
from baton.messages.request_limits import MAX_INPUTS, MAX_POOLING_BODY_BYTES, MAX_WORDS
from router.admission.checks import check_text
from router.http.bodies.fields import Bounded, Ignored, OnlyTrue, Strict, Texts, TextsOrIds, Truncation, is_ids
from router.pooling import PoolingCall, PoolingInput, TextPair


class PoolingBody(Strict):
    """What a call for vectors has beside its inputs."""

    core_names = {  # noqa: RUF012
        "request_id": ("request_id", "x-request-id"),
        "activate": ("use_activation", "activation"),
    }

    model: str | None = None
    truncate_prompt_tokens: Truncation = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None

    add_special_tokens: OnlyTrue = None
    user: Ignored = None
    # What the text is for, in Cohere's words: where a model wants a prefix for that, the client writes it.
    input_type: Ignored = None

    def pooling_inputs(self) -> Sequence[PoolingInput]:
        """What vectors are made of."""
        raise NotImplementedError

    def pooling(self) -> PoolingRequest:
        """The vectors that are wanted."""
        raise NotImplementedError

    def call(self, request_id: str, traceparent: str = "") -> PoolingCall:
        """The call as the router's core serves it."""
        return PoolingCall(
            inputs=self.pooling_inputs(),
            pooling=self.pooling(),
            request_id=request_id,
            model=self.model or "",
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            traceparent=traceparent,
            truncate=self.truncate_prompt_tokens,
        )


def _inputs(value: Any) -> Sequence[str | Sequence[int]]:
    if value in ("", []):
        raise ValueError("is empty")
    if isinstance(value, str) or is_ids(value):
        return (value,)
    if isinstance(value, list) and len(value) > MAX_INPUTS and not isinstance(value[0], int):
        raise ValueError(f"has {len(value)} inputs; at most {MAX_INPUTS} are taken")
    is_alike = isinstance(value, list) and (all(isinstance(item, str) for item in value) or all(map(is_ids, value)))
    if not is_alike:
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")
    if not all(value):
        raise ValueError(f"has an input that is empty: number {next(n for n, item in enumerate(value) if not item)}")
    return tuple(value)


Inputs = Annotated[Sequence[str | Sequence[int]], PlainValidator(_inputs, json_schema_input_type=TextsOrIds)]


def inputs_of(inputs: Sequence[str | Sequence[int]]) -> Sequence[PoolingInput]:
    """The inputs of a call, each with the name of its field."""
    alone = len(inputs) == 1
    return [PoolingInput(item, field="input" if alone else f"input[{index}]") for index, item in enumerate(inputs)]


class EmbeddingBody(PoolingBody):
    """POST /v1/embeddings"""

    inputs: Inputs = Field(alias="input")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling_type: Literal["last", "cls", "mean"] | None = Field(None, alias="pooling")
    normalize: bool | None = None

    def pooling_inputs(self) -> Sequence[PoolingInput]:
        return inputs_of(self.inputs)

    def pooling(self) -> PoolingRequest:
        kind = None if self.pooling_type is None else Pooling(self.pooling_type)
        return PoolingRequest(kind, self.normalize, self.dimensions)


_SCORE_BYTES = 64
"""A score in an answer, beside the text that it may repeat."""


def _texts(value: Any) -> Sequence[str]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError("must be a string or a list of strings")
    if not value:
        raise ValueError("is empty")
    if len(value) > MAX_INPUTS:
        raise ValueError(f"has {len(value)} texts; at most {MAX_INPUTS} are taken")
    return tuple(value)


def _documents(value: Any) -> Sequence[Document]:
    if not isinstance(value, list) or not all(isinstance(document, str | dict) for document in value):
        raise ValueError("must be a list of texts, or of objects with texts")
    if any(not isinstance(text, str) for document in value if isinstance(document, dict) for text in document.values()):
        raise ValueError("has an object with something else than texts")
    _texts([document if isinstance(document, str) else "" for document in value])
    for index, document in enumerate(value):
        if isinstance(document, dict):
            # The answer repeats an object whole, with names and texts that are not ranked, too.
            joined = "".join(chain.from_iterable(document.items()))
            check_text(_field("documents", index, len(value)), joined, MAX_POOLING_BODY_BYTES)
    return tuple(value)


def _distinct(names: list[str]) -> list[str]:
    # Joined as often as it is named, a text would be many times as long as the body.
    if twice := next((name for index, name in enumerate(names) if name in names[:index]), None):
        raise ValueError(f"has {twice[:80]!r} twice: name each field once")
    return names


Document = str | Mapping[str, str]
TextList = Annotated[Sequence[str], PlainValidator(_texts, json_schema_input_type=Texts)]
Documents = Annotated[Sequence[Document], PlainValidator(_documents, json_schema_input_type=list[str | dict[str, str]])]


class ClassifyBody(PoolingBody):
    """POST /classify"""

    inputs: Inputs = Field(alias="input")
    use_activation: bool | None = None
    activation: bool | None = None

    def pooling_inputs(self) -> Sequence[PoolingInput]:
        return inputs_of(self.inputs)

    def pooling(self) -> PoolingRequest:
        return PoolingRequest(Pooling.CLASSIFY, activate=False not in (self.use_activation, self.activation))


class ScoringBody(PoolingBody):
    """What calls for scores have in common."""

    use_activation: bool | None = None
    activation: bool | None = None

    def pairs(self) -> Sequence[TextPair]:
        """The pairs to score; raises InvalidRequest."""
        raise NotImplementedError

    def num_answer_bytes(self, pairs: Sequence[TextPair]) -> int:
        """About how long an answer is, which may repeat the texts of the pairs."""
        return sum(_SCORE_BYTES + len(pair.second) for pair in pairs)

    def pooling_inputs(self) -> Sequence[PoolingInput]:
        return ()

    def pooling(self) -> PoolingRequest:
        return PoolingRequest(activate=False not in (self.use_activation, self.activation))


class ScoreBody(ScoringBody):
    """POST /score"""

    text_1: TextList
    text_2: TextList

    def pairs(self) -> Sequence[TextPair]:
        seconds = self.text_2
        firsts = list(self.text_1) * (len(seconds) if len(self.text_1) == 1 else 1)
        if len(firsts) != len(seconds):
            message = f"has {len(seconds)} texts, and text_1 {len(firsts)}: it needs as many, or text_1 a single one"
            raise InvalidRequest("text_2", message)
        return [
            TextPair(first, second, "text_1", _field("text_2", index, len(seconds)))
            for index, (first, second) in enumerate(zip(firsts, seconds, strict=True))
        ]


class RerankBody(ScoringBody):
    """POST /rerank"""

    query: str
    documents: Documents
    top_n: int | None = Field(None, ge=0)
    return_documents: bool | None = None

    # Cohere's.
    max_tokens_per_doc: int | None = Field(None, ge=1)
    rank_fields: Annotated[list[str], Field(min_length=1), Bounded(MAX_WORDS), AfterValidator(_distinct)] | None = None

    def pairs(self) -> Sequence[TextPair]:
        count = len(self.documents)
        pairs = []
        for index, document in enumerate(self.documents):
            field = _field("documents", index, count)
            pairs.append(TextPair(self.query, self._text(document, field), "query", field))
        return pairs

    def num_answer_bytes(self, pairs: Sequence[TextPair]) -> int:
        objects = [document for document in self.documents if not isinstance(document, str)]
        return super().num_answer_bytes(pairs) + sum(len(text) for document in objects for text in document.values())

    def _text(self, document: Document, field: str) -> str:
        """The text by which a document is ranked; raises InvalidRequest if it has none."""
        if isinstance(document, str):
            return document
        names = self.rank_fields or ["text"]
        texts = [document[name] for name in names if name in document]
        if not texts:
            raise InvalidRequest(field, f"has none of the fields {', '.join(names)[:80]}: rank_fields names others")
        return "\n".join(texts)

    def call(self, request_id: str, traceparent: str = "") -> PoolingCall:
        return replace(super().call(request_id, traceparent), most_second_tokens=self.max_tokens_per_doc)


def _field(name: str, index: int, count: int) -> str:
    return name if count == 1 else f"{name}[{index}]"
