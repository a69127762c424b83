"""The bodies of /classify, /score and /rerank. Fields are vLLM's, and for reranking those of Jina and Cohere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from baton.errors import InvalidRequest
from baton.messages.pooling import Pooling, PoolingRequest
from baton.messages.request_limits import MAX_INPUTS
from router.http.bodies.embeddings import Inputs, inputs_of
from router.http.bodies.fields import Texts
from router.http.bodies.pooling import PoolingBody
from router.pooling import PoolingInput
from router.scoring import TextPair


def _texts(value: Any) -> Sequence[str]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError("must be a string or a list of strings")
    if not value:
        raise ValueError("is empty")
    if len(value) > MAX_INPUTS:
        raise ValueError(f"has {len(value)} texts; at most {MAX_INPUTS} are taken")
    return tuple(value)


def _documents(value: Any) -> Sequence[str]:
    if not isinstance(value, list):
        raise ValueError("must be a list of texts")
    return _texts([one["text"] if isinstance(one, dict) and set(one) == {"text"} else one for one in value])


TextList = Annotated[Sequence[str], PlainValidator(_texts, json_schema_input_type=Texts)]
Documents = Annotated[Sequence[str], PlainValidator(_documents, json_schema_input_type=Texts)]


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
            TextPair(first, second, "text_1", _field("text_2", place, len(seconds)))
            for place, (first, second) in enumerate(zip(firsts, seconds, strict=True))
        ]


class RerankBody(ScoringBody):
    """POST /rerank"""

    query: str
    documents: Documents
    top_n: int | None = Field(None, ge=0)
    return_documents: bool | None = None

    def pairs(self) -> Sequence[TextPair]:
        count = len(self.documents)
        return [
            TextPair(self.query, document, "query", _field("documents", place, count))
            for place, document in enumerate(self.documents)
        ]


def _field(name: str, place: int, count: int) -> str:
    return name if count == 1 else f"{name}[{place}]"
