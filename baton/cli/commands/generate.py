"""`baton generate`: sends one request and prints the generated text."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.cli.output import Format, OutputOption, print_answer, print_document, print_note, size
from baton.cli.sampling_options import (
    ChoiceOption,
    GrammarOption,
    JsonSchemaOption,
    MinPOption,
    RegexOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    constraint_fields,
)
from baton.cli.target import AddressesOption, RunDirOption, grpc_addresses, local_cluster, run_dir_of
from baton.errors import BatonError, Unreachable, UsageError
from baton.messages.generation import Chunk, Finished, GenerateEvent, GenerateRequest, SequenceFinished

_RETRY_BUDGET_S = 20.0
"""How long to try without a new token. A router that died is back sooner, and a person does not wait longer."""


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(generate)


@dataclass(slots=True)
class Choice:
    """One generated sequence."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"text": self.text, "token_ids": self.token_ids, "finish_reason": self.finish_reason}


@dataclass(slots=True)
class Answer:
    """The answer to a request, collected from its stream of events."""

    choices: list[Choice] = field(default_factory=lambda: [Choice()])
    finished: Finished | None = None

    def add(self, event: GenerateEvent) -> str:
        """Add an event, and return the text that it brings."""
        if isinstance(event, Finished):
            self.finished = event
            self.choices[0].finish_reason = event.finish_reason
        elif isinstance(event, SequenceFinished):
            self._choice(event.sequence_index).finish_reason = event.finish_reason
        elif isinstance(event, Chunk):
            choice = self._choice(event.sequence_index)
            choice.text += event.text
            choice.token_ids += event.token_ids
            return event.text
        return ""

    def _choice(self, index: int) -> Choice:
        while len(self.choices) <= index:
            self.choices.append(Choice())
        return self.choices[index]

    @property
    def text(self) -> str:
        """The generated text. Several sequences are numbered, one below the other."""
        if len(self.choices) == 1:
            return self.choices[0].text
        count = len(self.choices)
        parts = [f"[{place}/{count}] {choice.text}" for place, choice in enumerate(self.choices, 1)]
        return "\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The answer as a JSON object. Raises BatonError if the last event of the stream is missing."""
        end = self.finished
        if end is None:
            raise BatonError("the stream ended before the end of the request")
        if len(self.choices) == 1:
            output = self.choices[0].to_json()
        else:
            output = {"choices": [{"index": i, **choice.to_json()} for i, choice in enumerate(self.choices)]}
        return output | {
            "usage": {
                "prompt_tokens": end.prompt_tokens,
                "completion_tokens": end.completion_tokens,
                "cached_tokens": end.cached_tokens,
                "draft_tokens": end.draft_counts.num_drafted,
                "accepted_draft_tokens": end.draft_counts.num_accepted,
            },
            "path": {
                "prefill_node": end.path.prefill_node,
                "decode_node": end.path.decode_node,
                "attempts": end.path.attempts,
                "reason": end.path.reason,
            },
            "timings": {
                "queue_ms": end.queue_ms,
                "prefill_ms": end.prefill_ms,
                "transfer_ms": end.transfer_ms,
                "ttft_ms": end.ttft_ms,
                "total_ms": end.total_ms,
            },
            "kv_bytes": end.kv_bytes,
        }


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="Text to continue; - reads it from standard input.", show_default=False, metavar="PROMPT"),
    ] = None,
    token_ids: Annotated[
        str | None, typer.Option(help="Prompt as token ids such as 1,2,3, instead of text.", metavar="IDS")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Largest number of tokens to generate.", metavar="N")] = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the sampling; equal seeds give equal tokens.", metavar="N")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text. May be repeated.", metavar="TEXT")
    ] = None,
    n: Annotated[
        int,
        typer.Option(
            "-n", "--n", help="Number of sequences to generate, up to 128. Several are printed at the end.", metavar="N"
        ),
    ] = 1,
    best_of: Annotated[
        int | None, typer.Option(help="Generate N sequences, and keep the -n most likely ones.", metavar="N")
    ] = None,
    beam_width: Annotated[
        int | None, typer.Option(help="Beam search with N beams, 2 to 8; the best -n of them are printed.", metavar="N")
    ] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(
            help="Beams are compared by their log-probability divided by length to the power of X.", metavar="X"
        ),
    ] = None,
    early_stopping: Annotated[
        bool, typer.Option("--early-stopping", help="End the beam search as soon as enough beams have ended.")
    ] = False,
    json_schema: JsonSchemaOption = None,
    regex: RegexOption = None,
    choice: ChoiceOption = None,
    grammar: GrammarOption = None,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print the text while it is generated.")] = True,
    model: Annotated[
        str, typer.Option(help="Name of the model. Default: the only model of the cluster.", metavar="NAME")
    ] = "",
    timeout: Annotated[
        float | None, typer.Option(help="Longest time for the request, in seconds.", metavar="SECONDS", min=0)
    ] = None,
    run_dir: RunDirOption = None,
    address: AddressesOption = None,
    output: OutputOption = Format.TEXT,
) -> None:
    """Send a prompt and print the generated text."""
    from baton.client import GenerationClient

    request = GenerateRequest(
        prompt=_prompt(prompt, token_ids),
        model=model,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        n=None if n == 1 else n,
        best_of=best_of,
        beam_width=beam_width,
        length_penalty=length_penalty,
        early_stopping=early_stopping or None,
        **constraint_fields(json_schema, regex, choice, grammar),
    )
    shows = stream and n == 1 and output is Format.TEXT
    addresses = grpc_addresses(address, run_dir)
    has_cluster_ended = cluster_end_check(run_dir) if not address else bool
    client = GenerationClient(*addresses, retry_budget_s=_RETRY_BUDGET_S, has_cluster_ended=has_cluster_ended)
    try:
        answer = _collect(client.generate(request, timeout), show=shows)
    except Unreachable as error:
        hint = "is this the router's gRPC address?" if address else f"see {run_dir_of(run_dir).command('status')}"
        raise Unreachable(f"{error}: {hint}") from None
    finally:
        client.close()
    result = answer.to_json()
    if output is not Format.TEXT:
        print_document(output, result)
    else:
        print_answer("" if shows else answer.text)
        if answer.finished is not None and sys.stderr.isatty():
            print_note(summary(answer.finished))


def summary(end: Finished) -> str:
    """How a request was served, in one line."""
    path = end.path
    nodes = f"{path.prefill_node} → {path.decode_node}" if path.prefill_node else path.decode_node
    moved = f", {size(end.kv_bytes)} of KV in {end.transfer_ms:.1f} ms" if path.prefill_node else ""
    return (
        f"[{nodes}{moved}; {end.prompt_tokens} + {end.completion_tokens} tokens, "
        f"first after {end.ttft_ms:.0f} ms, {tokens_per_second(end):.0f} tokens/s, {end.finish_reason}]"
    )


def tokens_per_second(end: Finished) -> float:
    """Decode rate: tokens after the first, divided by the time after the first."""
    seconds = (end.total_ms - end.ttft_ms) / 1e3
    return (end.completion_tokens - 1) / seconds if seconds > 0 and end.completion_tokens > 1 else 0.0


def cluster_end_check(run_dir: Path | None) -> Callable[[], bool]:
    """A function that returns whether the cluster of a run directory is draining or has ended."""

    def ask() -> bool:
        try:
            return local_cluster(run_dir).state.phase == "draining"
        except BatonError:
            return True

    return ask


def _prompt(text: str | None, token_ids: str | None) -> str | list[int]:
    if (text is None) == (token_ids is None):
        raise UsageError("give either a PROMPT or --token-ids")
    if text is not None:
        return sys.stdin.read() if text == "-" else text
    words = [word for word in re.split(r"[\s,]+", token_ids or "") if word]
    if not all(word.isdigit() for word in words):
        raise UsageError("--token-ids: use numbers separated by commas, such as 1,2,3")
    return [int(word) for word in words]


def _collect(events: Iterator[GenerateEvent], *, show: bool) -> Answer:
    answer = Answer()
    for event in events:
        text = answer.add(event)
        if show and text:
            print_answer(text, end="")
    return answer
