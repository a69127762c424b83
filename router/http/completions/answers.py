"""Writes whole answers of completions and of chats: one object of JSON, piece by piece."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from baton.messages.generation import Chunk
from baton.messages.sampling import TokenLogprobs
from router.http.answers import Collected, in_runs, in_turns, runs_of
from router.http.completions.events import AnswerOptions, Label, final_usage
from router.http.completions.logprobs import AnswerFormat, ListWriter, TokenTexts, prompt_entries, unknown
from router.http.parsed_text import ParsedMessage, ParsedSequence, Spelling

Pieces = AsyncGenerator[str, None]


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt with which the text of each of its outputs begins."""

    text: str
    token_ids: Sequence[int] = ()
    """The tokens of which log-probabilities are wanted; empty: none is."""
    num_logprobs: int = 0
    """How many of the most likely tokens are wanted with each: `prompt_logprobs` may have asked for more of them."""


_json = json.JSONEncoder(ensure_ascii=False).encode


async def whole_answer(
    answer_format: AnswerFormat,
    label: Label,
    answers: Sequence[Collected],
    options: AnswerOptions,
    texts: TokenTexts,
    prompts: Sequence[Sequence[int]] = (),
    echoed: Sequence[EchoedPrompt] = (),
    parser: Callable[[int], ParsedSequence] | None = None,
) -> Pieces:
    """The answers of all prompts as one JSON object.

    `prompts`: the token ids of the prompts, if they are wanted. `echoed`: the prompts that begin their outputs' texts.
    `parser` makes the parser of a choice, if texts are parsed.
    """
    head = {"id": label.id, "object": answer_format.object_name, "created": label.created, "model": label.model}
    head["system_fingerprint"] = label.fingerprint
    yield f'{_json(head)[:-1]}, "choices": ['
    index = num_reasoning_tokens = 0
    for answer, prompt, echo in zip_longest(answers, prompts, echoed):
        for sequence in range(len(answer.chunks)):
            if index:
                await asyncio.sleep(0)  # there may be hundreds of long ones
                yield ", "
            # In the first choice of each prompt alone, since a prompt may be long and its choices many.
            more = {"prompt_token_ids": prompt} if prompt and sequence == 0 and not answer_format.has_one_prompt else {}
            parsed = parser(index) if parser is not None else None
            async for piece in _choice(answer, answer_format, options, texts, sequence, index, echo, parsed, **more):
                yield piece
            num_reasoning_tokens += parsed.num_reasoning_tokens if parsed is not None else 0
            index += 1
    ends = [answer.finished for answer in answers]
    tail: dict[str, object] = {"usage": final_usage(ends, num_reasoning_tokens, has_output=options.output)}
    if prompts and answer_format.has_one_prompt:
        tail["prompt_token_ids"] = prompts[0]
    yield "], "
    if options.prompt_logprobs and answer_format.has_one_prompt:
        yield '"prompt_logprobs": '
        async for piece in _prompt_logprobs(answers[0], texts.spelling):
            yield piece
        yield ", "
    yield _json(tail)[1:]


async def _choice(
    answer: Collected,
    answer_format: AnswerFormat,
    options: AnswerOptions,
    texts: TokenTexts,
    sequence: int,
    index: int,
    echo: EchoedPrompt | None = None,
    parsed: ParsedSequence | None = None,
    **more: object,
) -> Pieces:
    """A sequence as one of OpenAI's choices, in JSON. `place`: that of the sequence; `more`: further fields.

    `parsed`: the parser of its text, if that is parsed.
    """
    chunks = answer.chunks[sequence] if options.output else ()
    finish_reason, stop_reason = answer.ends[sequence] if options.output else ("length", None)
    if parsed is None:
        text = "".join(chunk.text for chunk in chunks)
        before = {"index": index, **answer_format.choice_of(text if echo is None else echo.text + text)}
    else:
        before = {"index": index, "message": await _message(parsed, chunks)}
        finish_reason = parsed.finish_reason(finish_reason)
    after = {"finish_reason": finish_reason, "stop_reason": stop_reason, **more}
    if options.token_ids:
        after["token_ids"] = [token for chunk in chunks for token in chunk.token_ids]
    yield f'{_json(before)[:-1]}, "logprobs": '
    if options.logprobs:
        async for piece in _logprobs(answer, answer_format, texts, chunks, echo):
            yield piece
    else:
        yield "null"
    if options.prompt_logprobs and sequence == 0 and not answer_format.has_one_prompt:
        yield ', "prompt_logprobs": '
        async for piece in _prompt_logprobs(answer, texts.spelling):
            yield piece
    yield f", {_json(after)[1:]}"


async def _logprobs(
    answer: Collected,
    answer_format: AnswerFormat,
    texts: TokenTexts,
    chunks: Sequence[Chunk],
    echo: EchoedPrompt | None,
) -> Pieces:
    """The log-probabilities of a sequence, behind those of an echoed prompt, as one object in JSON."""
    num_echoed = len(answer.prompt_logprobs) + 1 if echo is not None and echo.token_ids else 0
    texts = replace(texts, context=answer.accepted.contexts[0])
    writer = answer_format.logprobs(texts, num_echoed, 0 if echo is None else len(echo.text))
    brace = "{"
    for name, entries in writer.lists.items():
        yield f'{brace}"{name}": ['
        async for piece in _entries_json(entries, _runs(answer, chunks, echo)):
            yield piece
        yield "]"
        brace = ", "
    yield "}"


def _runs(answer: Collected, chunks: Sequence[Chunk], echo: EchoedPrompt | None) -> Iterator[Sequence[TokenLogprobs]]:
    """The positions of a sequence, behind those of an echoed prompt, a few at a time."""
    if echo is not None and echo.token_ids:
        yield [unknown(echo.token_ids[0])]
        for run in in_runs(answer.prompt_logprobs):
            yield [replace(position, top=position.top[: echo.num_logprobs]) for position in run]
    yield from runs_of(chunks)


async def _prompt_logprobs(answer: Collected, spelling: Spelling) -> Pieces:
    """The log-probabilities of the prompt in vLLM's format. The first token has none."""
    yield "[null"
    for run in in_runs(answer.prompt_logprobs):
        await asyncio.sleep(0)
        yield "".join(f", {_json(entry)}" for entry in prompt_entries(run, spelling))
    yield "]"


async def _message(parsed: ParsedSequence, chunks: Sequence[Chunk]) -> Mapping[str, Any]:
    """The message that a sequence's text is."""
    message = ParsedMessage()
    async for chunk in in_turns(chunks):
        parsed.count(chunk.token_ids)
        message.add(parsed.push(chunk.text))
    message.add(parsed.finish())
    return message.fields()


async def _entries_json(entries: ListWriter, runs: Iterator[Sequence[TokenLogprobs]]) -> Pieces:
    """The entries of one list in JSON. They may be a million numbers, so other requests get their turns."""
    comma = ""
    for run in runs:
        await asyncio.sleep(0)
        yield comma + _json(entries(run))[1:-1]
        comma = ", "
