"""`baton generate`: sends one request and prints the generated text."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from baton.cli.output import Format, OutputOption, print_answer, print_document, print_note
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
from baton.cli.target import AddressesOption, RunDirOption, cluster_end_check, grpc_addresses, run_dir_of
from baton.cli.views.answer import Answer, summary
from baton.errors import Unreachable, UsageError
from baton.messages.generation import GenerateEvent, GenerateRequest

_RETRY_BUDGET_S = 20.0
"""How long to try without a new token. A router that died is back sooner, and a person does not wait longer."""


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(generate)


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
