"""Prompts with rows of numbers in place of tokens, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from safetensors.torch import save

from baton.messages.spans import PLACEHOLDER, Span, digest_of_rows


def span_of(rows: torch.Tensor, start: int = 0) -> Span:
    """A span with these rows [length, width]."""
    length, width = rows.shape
    content = rows.contiguous().view(torch.uint8).numpy().tobytes()
    dtype = str(rows.dtype).removeprefix("torch.")
    return Span(start, length, digest_of_rows(dtype, length, width, content), dtype, content)


def with_placeholders(token_ids: Sequence[int], spans: Sequence[Span]) -> list[int]:
    """The tokens of a prompt with placeholders at the positions of spans."""
    found = list(token_ids)
    for span in spans:
        found[span.start : span.stop] = [PLACEHOLDER] * span.length
    return found


def random_rows(length: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows about as large as those of a tiny model's embedding."""
    return (0.15 * torch.randn(length, width, generator=torch.Generator().manual_seed(seed))).to(dtype)


def safetensors_of(rows: torch.Tensor) -> bytes:
    """The bytes of a safetensors file with these rows."""
    content: bytes = save({"prompt_embeds": rows.contiguous()})
    return content
