"""The sampler: what a step's sampling takes by what its rows ask for."""

from __future__ import annotations

from dataclasses import replace

import torch

from baton.messages.sampling import SamplingParams
from baton.runner.execution.sampler import SamplingState
from gpu.made_model import made_sampler
from gpu.micro.host_work import seconds_of
from gpu.room import device_of, has_room
from gpu.shapes import LLAMA_1B, TINY
from gpu.stage import StageContext

_GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
_SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=64)
KINDS = {
    "greedy": _GREEDY,
    "greedy, 5 log-probabilities": replace(_GREEDY, logprobs=5),
    "temperature": _SAMPLED,
    "temperature, top_k 50": replace(_SAMPLED, top_k=50),
    "temperature, top_p 0.95": replace(_SAMPLED, top_p=0.95),
    "temperature, top_p 0.95, repetition_penalty": replace(_SAMPLED, top_p=0.95, repetition_penalty=1.1),
}
_PROMPT = list(range(64))
_DEVIATION = 3.0
_NUM_LIKELY, _LIKELIER = 8, 15.0
"""In peaked logits so many tokens are so much likelier that they have nearly all probability; in flat ones the largest
share is spread over thousands."""


def measure(context: StageContext) -> None:
    """Report how long a step's sampling takes, from logits on the device to the results in the host's memory."""
    vocab = TINY.vocab if context.tiny else LLAMA_1B.vocab
    sampler = made_sampler(device_of(context), vocab)
    for rows in (2,) if context.tiny else (1, 16, 128):
        for peaked in (True, False):
            if not has_room(context, f"sampler of {rows}", num_bytes=16 * rows * vocab, seconds=2):
                continue
            logits = _logits(context, rows, vocab, peaked=peaked)
            for kind, params in KINDS.items():
                states = [SamplingState(params, _PROMPT, len(_PROMPT) - 8, frozenset())] * rows
                taken = seconds_of(context, lambda states=states, logits=logits: sampler.sample(logits, states))
                context.report(
                    "sampler", kind=kind, logits="peaked" if peaked else "flat", rows=rows, vocab=vocab, ms=taken * 1e3
                )


def _logits(context: StageContext, rows: int, vocab: int, *, peaked: bool) -> torch.Tensor:
    """Normally distributed logits; the likely tokens are spread over the vocabulary."""
    device = device_of(context)
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator, device=device) * _DEVIATION
    if peaked:
        logits[:, :: vocab // _NUM_LIKELY] += _LIKELIER
    return logits
