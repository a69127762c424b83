"""What a request's output is computed from: one value from a router's checks to a node's engine."""

from __future__ import annotations

from collections.abc import Sequence

from baton.messages.pooling import PoolingParams
from baton.messages.sampling import SamplingParams
from baton.messages.spans import EncoderContent, Span
from baton.values import value


@value(frozen=True, slots=True)
class RequestSpec:
    """A request within all bounds, with every default filled in. Its output is a function of this value alone.

    A router makes it, with its own fields beside it (`router.admission.request`), `Submit` brings it to nodes, and the
    engine computes it (`baton.engine.request.Request`).
    """

    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams
    priority: int = 0
    """Smaller numbers come first. It decides when the output comes, and nothing of it."""
    cache_salt: str = ""
    """Requests share cached KV only with those of the same salt."""
    pooling: PoolingParams | None = None
    """The vector that is wanted of the prompt, and no output; None: an output is wanted, or, of an embedding leg, the
    last token's embedding."""
    spans: Sequence[Span] = ()
    """The spans of the prompt, in order, with their rows unless an encoder makes them."""
    contents: Sequence[EncoderContent] = ()
    """What encoders make rows of for the prompt, each once, with its data."""
    adapter: str = ""
    """Digest of the adapter with which it is computed; empty: none."""
