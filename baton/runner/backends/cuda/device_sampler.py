"""Draws tokens where the logits are: one copy to the device, at most three kernels, and one copy of results back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton.errors import ConfigError
from baton.messages.sampling import SamplingParams
from baton.runner.backends.cuda.trials import why_failed
from baton.runner.execution.sampler import HostSampler, Sampled, Sampler, SamplingState
from baton.runner.execution.sampling_arrays import MOST_TOKENS, Drawing, SamplingArrays, StepArrays

_log = logging.getLogger(__name__)

NUMERICS = "sampler-1"
"""Counted up whenever the kernels draw other tokens."""
_WORD = 8
"""Every array begins at a multiple of so many bytes."""


class DeviceSampler:
    """Draws in Triton's kernels (sampling/). Called from one thread."""

    is_on_device = True

    def __init__(self, device: torch.device, vocab_size: int, **sizes: int) -> None:
        """`sizes`: arguments of `sampling.draw`, for tests. Raises ConfigError for a vocabulary that is too large."""
        if vocab_size > MOST_TOKENS:
            raise ConfigError(
                f"a vocabulary of {vocab_size} tokens is too large for the kernels: {MOST_TOKENS} at most"
            )
        # Triton is there only where torch was built for GPUs.
        from baton.runner.backends.cuda.sampling.draw import draw
        from baton.runner.backends.cuda.sampling.report import report
        from baton.runner.backends.cuda.sampling.survey import survey

        self._survey: Any = survey
        self._draw: Any = partial(draw, **sizes)  # type: ignore[arg-type]
        self._report: Any = partial(report, tile=sizes["tile"]) if sizes else report
        self._device = device
        self._arrays = SamplingArrays(vocab_size)
        self._host = self._host_memory(0)

    def _host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def sample(self, logits: torch.Tensor | npt.NDArray[np.float32], states: Sequence[SamplingState]) -> list[Sampled]:
        """See `Sampler.sample`. Raises ValueError for logits of another vocabulary."""
        if isinstance(logits, np.ndarray):
            # Steps of which others want logits or hidden states, too, have brought all to the host.
            logits = torch.from_numpy(logits).to(self._device)
        if logits.shape[1] != self._arrays.vocab_size:
            raise ValueError(f"{logits.shape[1]} logits a row, and the vocabulary has {self._arrays.vocab_size} tokens")
        on_device = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        with on_device, torch.inference_mode():
            step = self._arrays.of_step(states)
            results, drawing, reports = self._sent(step)
            if states:
                self._survey(logits, results)
            if len(drawing.fields):
                self._draw(logits, results, drawing)
            if len(reports):
                self._report(logits, results, drawing.masks, reports)
            return self._arrays.sampled(states, step, self._received(results))

    def _sent(self, step: StepArrays) -> tuple[torch.Tensor, Drawing, torch.Tensor]:
        """The arrays of a step on the device: the results, those of `draw`, and the reports."""
        arrays = step.results, *step.drawing, step.reports
        starts = np.cumsum([0, *(-(-array.nbytes // _WORD) * _WORD for array in arrays)]).tolist()
        if self._host.numel() < starts[-1]:
            self._host = self._host_memory(2 * starts[-1])
        memory = self._host.numpy()
        for array, start in zip(arrays, starts, strict=False):
            memory[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
        there = self._host[: starts[-1]].to(self._device, non_blocking=True, copy=True)
        results, *drawing, reports = (
            there[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
            for array, start in zip(arrays, starts, strict=False)
        )
        return results, Drawing(*drawing), reports

    def _received(self, results: torch.Tensor) -> npt.NDArray[np.int64]:
        """The results in the host's memory, over what was sent. All that was started before is computed then."""
        here = self._host[: results.nbytes].view(torch.int64)
        here.copy_(results, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return here.numpy()


_SEEDS = range(3)
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"temperature": 0.7, "top_p": 0.9, "logit_bias": {3: -2.0, 5: 4.0}},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
    {"temperature": 0.0, "logprobs": 3},
    {"top_n_sigma": 1.5, "frequency_penalty": 0.5, "allowed_token_ids": tuple(range(0, 50, 3))},
)
"""What is tried before a device samples."""


def sampler_on(device: torch.device, vocab_size: int) -> Sampler:
    """What samples for a model on this device: the kernels on a GPU, if they draw the right tokens there."""
    if device.type != "cuda":
        return HostSampler()
    why_not = ""
    try:
        sampler = DeviceSampler(device, vocab_size)
        why_not = why_not_right(sampler, device, vocab_size)
    except Exception as error:  # of the driver or of Triton's compiler
        why_not = why_failed(error)
    if not why_not:
        return sampler
    _log.warning("tokens are sampled on the host, which is slow: %s", why_not)
    return HostSampler()


def why_not_right(sampler: Sampler, device: torch.device, vocab_size: int) -> str:
    """Why a sampler on a device can't be used; empty if it draws the tokens that numpy draws, each row on its own."""
    params = [SamplingParams(**kind, seed=seed) for kind in _KINDS for seed in _SEEDS]
    states = [SamplingState(one, [1, 2, 2, 3], 2, frozenset({0})) for one in params]
    logits = np.random.default_rng(0).normal(size=(len(states), vocab_size)).astype(np.float32) * np.float32(3.0)
    there = torch.from_numpy(logits).to(device)
    together = sampler.sample(there, states)
    if not all(map(_are_alike, together, HostSampler().sample(logits, states))):
        return "Triton's kernels draw other tokens than numpy"
    if together[-1:] != sampler.sample(there[-1:], states[-1:]):
        return "Triton's kernels draw another token of a row alone than in a batch"
    return ""


def _are_alike(one: Sampled, other: Sampled) -> bool:
    """Whether two results have the same tokens, and log-probabilities that differ in their last bits alone."""
    if one.logprobs is None or other.logprobs is None:
        return one == other
    tokens, numbers = [], []
    for given in (one.logprobs, other.logprobs):
        tokens.append((given.token_id, given.rank, [token for token, _ in given.top]))
        numbers.append([given.logprob, *(number for _, number in given.top)])
    return one.token_id == other.token_id and tokens[0] == tokens[1] and np.allclose(numbers[0], numbers[1], atol=1e-4)
