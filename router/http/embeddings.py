"""The endpoint /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from baton.messages.generation import Finished
from router.http.bodies.embeddings import EmbeddingBody
from router.http.pooling_endpoint import PoolingEndpoint, as_json, usage_of
from router.pooling import PoolingCall, numbers_of


class Embeddings(PoolingEndpoint[EmbeddingBody]):
    """POST /v1/embeddings"""

    body = EmbeddingBody

    def _answer(self, body: EmbeddingBody, call: PoolingCall, results: Sequence[Finished]) -> bytes:
        write = _as_base64 if body.encoding_format == "base64" else numbers_of
        return as_json(
            {
                "object": "list",
                "data": (
                    {"object": "embedding", "index": place, "embedding": write(one.embedding)}
                    for place, one in enumerate(results)
                ),
                "model": body.model or self._model.card.name,
                "usage": usage_of(results),
            }
        )


def _as_base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()
