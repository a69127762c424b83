"""The request of a node for rows that the encoder of another one has made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowsRequest:
    """Which rows a node asks for, and what must be the same on both nodes, so that the numbers are."""

    incarnation: str
    """The node that is asked."""
    digest: str
    """Names the input, see `EncoderContent.digest`."""
    model_fingerprint: str
    dtype: str
    numerics: str
