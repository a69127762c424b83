"""The request of a node for rows that the encoder of another one has made."""

from __future__ import annotations

from dataclasses import dataclass

DECIDE_ROWS = ("model_fingerprint", "dtype", "numerics")
"""The fields, here and in NodeDescription, that decide which numbers an encoder makes of an input."""


@dataclass(frozen=True, slots=True)
class RowsRequest:
    """The rows that a node asks for, and what must be the same on both nodes (DECIDE_ROWS)."""

    incarnation: str
    """The node that is asked."""
    digest: str
    """Names the input, see `EncoderContent.digest`."""
    model_fingerprint: str
    dtype: str
    numerics: str
