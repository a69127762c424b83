"""What models make of the output of their head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

LogitsKind = Literal["as they are", "times", "over", "capped"]


@dataclass(frozen=True, slots=True)
class LogitsMap:
    """What a model makes of the output of its head."""

    kind: LogitsKind = "as they are"
    number: float = 1.0

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """The model's logits, from the output of the head, of the same shape."""
        if self.kind == "as they are":
            return logits
        if self.kind == "times":
            return logits * self.number
        if self.kind == "over":
            return logits / self.number
        return torch.tanh(logits / self.number) * self.number
