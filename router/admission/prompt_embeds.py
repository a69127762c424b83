"""Checks rows that a request has in place of tokens, and makes the spans of its prompt from them."""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import InvalidRequest, NoCapacity
from baton.messages.capabilities import Capability, check_capable
from baton.messages.generation import GenerateRequest, ModelCard
from baton.messages.prompt_rows import PromptRows, UnsoundRows, read_rows
from baton.messages.request_limits import MAX_SPANS
from baton.messages.spans import PLACEHOLDER, Span, digest_of_rows
from router.admission.lengths import too_long

_FIELD = "prompt_embeds"
NOT_TAKEN = "is not taken here; an operator allows it with --allow-prompt-embeds on"


def read_prompt_embeds(raw: GenerateRequest, card: ModelCard, most_bytes: int) -> Sequence[PromptRows]:
    """The rows of a request, in order, all within bounds; raises InvalidRequest, or NoCapacity before a node is known.

    `most_bytes`: of all of them together, with their headers; 0: none are taken.
    """
    given = raw.prompt_embeds
    if not most_bytes:
        raise InvalidRequest(_FIELD, NOT_TAKEN)
    if len(given) > MAX_SPANS:
        raise InvalidRequest(_FIELD, f"has {len(given)} entries; at most {MAX_SPANS} are taken")
    num_bytes = sum(len(one.data) for one in given)
    if num_bytes > most_bytes:
        raise InvalidRequest(_FIELD, f"has {num_bytes} bytes; at most {most_bytes} are taken here")
    if not card.capabilities:
        raise NoCapacity(f"no node that serves {card.name} has been seen yet, so rows for it can't be checked")
    check_capable(card.name, {Capability.PROMPT_EMBEDS}, card.capabilities)
    if raw.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs", f"does not go with {_FIELD}: rows have no log-probabilities")
    if any(one.start is None for one in given) and len(given) > 1:
        raise InvalidRequest(f"{_FIELD}.start", "is required in each of several entries")
    if given[0].start is not None and isinstance(raw.prompt, str):
        raise InvalidRequest(f"{_FIELD}.start", "is a place among token ids; this prompt is a text")
    return [_rows(one.data, card, _name(place, len(given))) for place, one in enumerate(given)]


def with_spans(
    prompt: Sequence[int], embeds: Sequence[PromptRows], raw: GenerateRequest, card: ModelCard
) -> tuple[tuple[int, ...], tuple[Span, ...]]:
    """The prompt with placeholders, and its spans; raises InvalidRequest if they don't fit together.

    `embeds`: from `read_prompt_embeds`.
    """
    if raw.prompt_embeds[0].start is None:
        prompt, starts = [*[PLACEHOLDER] * embeds[0].length, *prompt], [0]
        if len(prompt) >= card.max_model_len:
            raise too_long("prompt", len(prompt), card.max_model_len - 1, card, "tokens and rows")
    else:
        prompt, starts = list(prompt), [one.start or 0 for one in raw.prompt_embeds]
    spans: list[Span] = []
    for place, (rows, start) in enumerate(zip(embeds, starts, strict=True)):
        before, stop = spans[-1].stop if spans else 0, start + rows.length
        if not before <= start or stop > len(prompt):
            message = f"puts rows at {start} to {stop}; they must lie behind {before} in a prompt of {len(prompt)}"
            raise InvalidRequest(f"{_name(place, len(embeds))}.start", message)
        prompt[start:stop] = [PLACEHOLDER] * rows.length
        digest = digest_of_rows(rows.dtype, rows.length, rows.width, rows.rows)
        spans.append(Span(start, rows.length, digest, rows.dtype, bytes(rows.rows)))
    return tuple(prompt), tuple(spans)


def _rows(data: bytes, card: ModelCard, field: str) -> PromptRows:
    try:
        rows = read_rows(data)
    except UnsoundRows as error:
        raise InvalidRequest(field, str(error)) from None
    if rows.width != card.row_width:
        raise InvalidRequest(field, f"has rows of {rows.width} numbers; those of {card.name} have {card.row_width}")
    if rows.length >= card.max_model_len:
        raise too_long(field, rows.length, card.max_model_len - 1, card, "rows")
    return rows


def _name(place: int, count: int) -> str:
    return _FIELD if count == 1 else f"{_FIELD}[{place}]"
