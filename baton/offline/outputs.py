"""What offline use returns, and the progress bar while it computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from baton.errors import BatonError, EngineFault
from baton.messages.sampling import TokenLogprobs


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the outputs that were generated from a prompt."""

    index: int
    text: str
    """The text without special tokens, and without the stop string that ended it."""
    token_ids: Sequence[int]
    finish_reason: str
    """stop (by a stop token, a stop string or the model's end token) or length (by `max_tokens`)."""
    stop_reason: int | str | None
    """The stop token or string that ended the output, unless the model's own end token did."""
    logprobs: Sequence[TokenLogprobs]
    """The log-probabilities at each position; empty unless the request asks for them."""

    @property
    def cumulative_logprob(self) -> float | None:
        """The logarithm of the output's probability; None if the request asks for no log-probabilities."""
        return math.fsum(position.logprob for position in self.logprobs) if self.logprobs else None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All outputs for one prompt."""

    request_id: str
    prompt: str | None
    """The prompt as it was given; None if it was given as token ids or as a chat."""
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    """As many as `SamplingParams.n` says; with `best_of` or beams the most likely first."""
    seed: int
    """The seed that was used; with it the same request gives the same tokens again."""
    num_cached_tokens: int
    """Tokens of the prompt whose KV was in the prefix cache."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """The log-probabilities of the prompt's tokens from the second one on; empty unless the request asks for them."""
    num_draft_tokens: int = 0
    """Tokens that were drafted and verified, of all sequences; 0 without speculation."""
    num_accepted_tokens: int = 0
    """The drafted tokens that are tokens of an output."""


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of one text."""

    prompt_token_ids: Sequence[int]
    embedding: npt.NDArray[np.float32]
    """A vector of norm 1, float32."""


class RequestsFailed(EngineFault):
    """Some of several requests failed while they ran; the others have their results.

    `outputs` has for each prompt, in order, its result, or the error with which it failed.
    """

    def __init__(self, outputs: Sequence[RequestOutput | EmbeddingOutput | BatonError]) -> None:
        self.outputs = tuple(outputs)
        failed = [index for index, output in enumerate(outputs) if isinstance(output, BatonError)]
        first = failed[0]
        super().__init__(f"{len(failed)} of {len(outputs)} requests failed, first prompt {first}: {outputs[first]}")


OnProgress = Callable[[int, int], None]
"""Takes how many requests have ended, and how many tokens were generated, so far."""


@contextmanager
def progress_bar(total: int, *, is_wanted: bool, console: Console | None = None) -> Iterator[OnProgress]:
    """A function that moves the bar. Nothing is written unless it `is_wanted` and the console is a terminal."""
    console = console or Console(stderr=True)
    if not (is_wanted and console.is_terminal):
        yield lambda num_ended, num_tokens: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("prompts", total=total, tokens=0)
        yield lambda num_ended, num_tokens: bar.update(task, completed=num_ended, tokens=num_tokens)
