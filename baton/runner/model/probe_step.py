"""An arbitrary step, with which a model that is being loaded shows what its layers do."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from baton.runner.model.stage import Received, StageModule

_FEW_LOGITS = 256


class ProbeStep(NamedTuple):
    """What a model is called with."""

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    rows: torch.Tensor
    """The rows that give logits: all, unless the step is `with_few_logits`."""
    received: Received | None
    """What the stage before would have sent; None in the first stage."""

    @classmethod
    def of(cls, config: Any, num_rows: int, max_model_len: int, device: torch.device) -> ProbeStep:
        """A step of a model's first stage."""
        rows = np.arange(num_rows)
        # Angles of transformers change for good behind the longest sequence.
        positions = np.minimum(rows, max_model_len - 1)
        token_ids = (rows * 7919) % config.vocab_size
        token_ids[-1] = config.vocab_size - 1  # a table of embeddings by layer may end before it
        return cls(token_ids, positions, torch.arange(num_rows, device=device), None)

    def behind(self, part: StageModule, width: int, dtype: torch.dtype) -> ProbeStep:
        """The same of a stage behind the first. `width`: of the rows between layers; `dtype`: of the embedding's."""
        generator = torch.Generator().manual_seed(0)
        num_rows = self.rows.shape[0]
        sent = torch.randn(num_rows, width + part.embedding_width, dtype=torch.float32, generator=generator)
        return self._replace(received=Received.of(sent.to(self.rows.device, part.row_dtype), width, dtype).copy())

    @property
    def with_few_logits(self) -> ProbeStep:
        """The same in which so many rows give logits as streams may be decoded at once."""
        return self._replace(rows=self.rows[-_FEW_LOGITS:])

    @property
    def with_other_embedding(self) -> ProbeStep:
        """The same with other rows of the embedding beside those that are received."""
        if self.received is None or self.received.embedding is None:
            return self
        return self._replace(received=self.received._replace(embedding=self.received.embedding.flip(0)))

    @property
    def with_other_tokens(self) -> ProbeStep:
        """The same with other token ids."""
        return self._replace(token_ids=np.zeros_like(self.token_ids))
