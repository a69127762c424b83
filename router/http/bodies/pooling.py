"""Fields that all bodies have from whose inputs vectors are made."""

from __future__ import annotations

from collections.abc import Sequence

from baton.messages.pooling import PoolingRequest
from router.http.bodies.fields import Ignored, OnlyTrue, Truncation
from router.http.bodies.strict import Strict
from router.pooling import PoolingCall, PoolingInput


class PoolingBody(Strict):
    """What a call for vectors has beside its inputs."""

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
