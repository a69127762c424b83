"""Computes the logits of a few tokens by transformers alone: its module as it was loaded, with its eager attention.

Called before any part of the module is replaced. Weights that are still in their files are read, and quantised ones
made plain, one linear layer or expert at a time; pages of files are dropped behind every layer, so that little memory
is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from baton.runner.model.attention import ATTENTION_NAME
from baton.runner.model.layers import EXPERTS_NAME
from baton.runner.model.mapped_files import MappedFiles
from baton.runner.model.stored_layers import StoredLinear, experts_on_file, held_experts
from baton.runner.model.weights import LoadedModel

_EAGER = "eager"


class EagerLogits(NamedTuple):
    """What transformers computes of one sequence."""

    exact: npt.NDArray[np.float32]
    """[tokens, vocabulary], on the host."""
    moved: float
    """How far noise in the rows of the embedding moves the median row (`row_errors`): the most of all noisy copies."""


def eager_logits(loaded: LoadedModel, token_ids: Sequence[int], noise: float, num_noisy: int) -> EagerLogits:
    """The logits behind each of these tokens, and how far the model carries what is rounded once.

    `noise`: its size as a share of each number; so many copies have some of their own. The module is as it was before
    on return.
    """
    module: Any = loaded.module
    mapped = MappedFiles(loaded.checkpoint.weight_files)
    count = len(token_ids)

    def add_noise(_embedding: Any, _given: Any, rows: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        factors = 1 + noise * torch.randn((num_noisy, *rows.shape[1:]), generator=generator)
        return torch.cat([rows[:1], (rows[1:].float() * factors).to(rows.dtype)])

    with ExitStack() as stack:
        stack.callback(mapped.release_all)
        stack.callback(module.get_input_embeddings().register_forward_hook(add_noise).remove)
        for part in module.modules():
            for layer in part if isinstance(part, nn.ModuleList) else ():
                stack.callback(layer.register_forward_hook(lambda *_: mapped.release_all()).remove)
        with _as_transformers_has_it(loaded), torch.inference_mode():
            # All sequences at once, since it is the weights that take the time.
            out = module(
                input_ids=torch.tensor([list(token_ids)] * (1 + num_noisy)),
                position_ids=torch.arange(count).expand(1 + num_noisy, count),
                use_cache=False,
                logits_to_keep=torch.arange(count),
            )
        exact = _on_host(out.logits[0])
        moved = [np.median(row_errors(_on_host(noisy), exact)) for noisy in out.logits[1:]]
        return EagerLogits(exact, float(np.max(moved)))


def row_errors(computed: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The root of the mean square difference of each row."""
    # Damaged weights give infinite logits, which are refused without a warning of numpy's.
    with np.errstate(invalid="ignore", over="ignore"):
        errors: npt.NDArray[np.float32] = np.sqrt(np.square(computed - expected).mean(axis=1))
    return errors


def _on_host(logits: torch.Tensor) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = logits.to(torch.float32).numpy()
    return array


@contextmanager
def _as_transformers_has_it(loaded: LoadedModel) -> Iterator[None]:
    """Let a model's module compute attention, experts and linear layers as transformers does without Baton."""
    module = loaded.module
    configs = {id(config): config for part in module.modules() if (config := getattr(part, "config", None)) is not None}
    with ExitStack() as stack:
        for config in configs.values():
            for name, ours in (("_attn_implementation", ATTENTION_NAME), ("_experts_implementation", EXPERTS_NAME)):
                # What is behind these properties: they would set the configurations of all parts.
                name = f"{name}_internal"
                if getattr(config, name, None) == ours:
                    setattr(config, name, _EAGER)
                    stack.callback(setattr, config, name, ours)
        for part in module.modules():
            if isinstance(part, StoredLinear):
                part.forgets = True
                stack.callback(setattr, part, "forgets", False)
            elif held_experts(part):
                stack.enter_context(experts_on_file(part))
        yield
