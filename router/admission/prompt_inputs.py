"""Checks what prompts have beside tokens, before anything is decoded: given rows, images, the input of an encoder."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.errors import ContextLengthExceeded, InvalidRequest, NoCapacity
from baton.messages.generation import GenerateRequest, ModelCard
from baton.messages.node_model import Capability, check_capable
from baton.messages.prompt_rows import PromptRows, UnsoundRows, read_rows
from baton.messages.request_limits import MAX_AUDIO_BYTES, MAX_SPANS
from baton.messages.spans import PLACEHOLDER, ContentKind, EncoderContent, Span, digest_of_rows, source_spans
from baton.model_formats.encoder_decoders import EncoderDecoder
from baton.model_formats.images import ImageLimits
from baton.text.prompts import FIELD, ImagePrompts, PromptImage
from router.admission.checks import check_can, too_long

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
    num_bytes = sum(len(embeds.data) for embeds in given)
    if num_bytes > most_bytes:
        raise InvalidRequest(_FIELD, f"has {num_bytes} bytes; at most {most_bytes} are taken here")
    if not card.capabilities:
        raise NoCapacity(f"no node that serves {card.name} has been seen yet, so rows for it can't be checked")
    check_capable(card.name, {Capability.PROMPT_EMBEDS}, card.capabilities)
    if raw.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs", f"does not go with {_FIELD}: rows have no log-probabilities")
    if any(embeds.start is None for embeds in given) and len(given) > 1:
        raise InvalidRequest(f"{_FIELD}.start", "is required in each of several entries")
    if given[0].start is not None and isinstance(raw.prompt, str):
        raise InvalidRequest(f"{_FIELD}.start", "is a place among token ids; this prompt is a text")
    return [_rows(embeds.data, card, _name(index, len(given))) for index, embeds in enumerate(given)]


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
        prompt, starts = list(prompt), [embeds_input.start or 0 for embeds_input in raw.prompt_embeds]
    spans: list[Span] = []
    for index, (rows, start) in enumerate(zip(embeds, starts, strict=True)):
        before, stop = spans[-1].stop if spans else 0, start + rows.length
        if not before <= start or stop > len(prompt):
            message = f"puts rows at {start} to {stop}; they must lie behind {before} in a prompt of {len(prompt)}"
            raise InvalidRequest(f"{_name(index, len(embeds))}.start", message)
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


def _name(index: int, count: int) -> str:
    return _FIELD if count == 1 else f"{_FIELD}[{index}]"


@dataclass(frozen=True, slots=True)
class ImageRules:
    """How images of the model are read, and within which bounds."""

    prompts: ImagePrompts
    most_images: int
    """The most images of a request."""
    most_bytes: int
    """The most bytes of all images of a request together."""
    most_pixels: int
    """The most pixels of one image."""

    def read(self, images: Sequence[bytes]) -> Sequence[PromptImage]:
        """The images of a prompt, of which only the headers are read. Raises InvalidRequest for those out of bounds."""
        if len(images) > self.most_images:
            raise InvalidRequest(FIELD, f"are {len(images)}; at most {self.most_images} are taken here")
        num_bytes = sum(map(len, images))
        if num_bytes > self.most_bytes:
            raise InvalidRequest(FIELD, f"have {num_bytes} bytes; at most {self.most_bytes} are taken here")
        return self.prompts.read(images, ImageLimits(self.most_bytes, self.most_pixels))


def check_takes_images(card: ModelCard, rules: ImageRules | None) -> ImageRules:
    """The rules of a model that takes images here. Raises UnsupportedRequest for another."""
    check_can(card, Capability.IMAGE, is_taken=rules is not None)
    assert rules is not None
    return rules


def read_images(raw: GenerateRequest, card: ModelCard, rules: ImageRules | None) -> Sequence[PromptImage]:
    """The images of a request; raises InvalidRequest or UnsupportedRequest, also for what does not go with images."""
    rules = check_takes_images(card, rules)
    if raw.prompt_embeds:
        raise InvalidRequest("prompt_embeds", f"do not go with {FIELD}")
    if raw.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs", f"does not go with {FIELD}: their rows have no log-probabilities")
    return rules.read(raw.images)


@dataclass(frozen=True, slots=True)
class SourcePrompt:
    """A prompt that begins with an input of the encoder."""

    token_ids: tuple[int, ...]
    """Placeholders at the positions of the input, and behind them the decoder's tokens."""
    spans: tuple[Span, ...]
    content: EncoderContent
    num_left: int
    """How many tokens the decoder can have behind these."""


def read_source(
    raw: GenerateRequest,
    card: ModelCard,
    source: EncoderDecoder,
    encode: Callable[[int], tuple[int, ...]],
) -> SourcePrompt:
    """The prompt of a request for a model with an encoder; `encode` gives its prompt's ids, at most so many.

    Of a model that takes text the prompt is the encoder's; of one that takes speech it is the decoder's, and may be
    missing. Raises InvalidRequest.
    """
    for field in ("prompt_embeds", "images"):
        if getattr(raw, field):
            raise InvalidRequest(field, f"are not taken by {card.name}, which has an encoder")
    if raw.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs", f"are not computed by {card.name}, which has an encoder")
    if source.source == "speech":
        check_audio(raw, card)
        prompt = encode(source.most_tokens - 1) if raw.prompt else ()
        tokens = prompt or source.start
        content, num_rows = EncoderContent.of(raw.audio, ContentKind.SPEECH), source.most_rows
    else:
        refuse_audio(raw, card)
        prompt = encode(source.most_rows)
        tokens, num_rows = source.start, len(prompt)
        content = EncoderContent.of(struct.pack(f"<{num_rows}I", *prompt), ContentKind.TEXT)
    spans = source_spans(content.digest, num_rows)
    num_left = source.num_left(len(prompt), card.max_model_len)
    if num_left < 1:
        num_taken = spans[-1].stop + len(tokens)
        length = card.max_model_len
        reason = f"takes {num_taken} positions with the encoder's input, and leaves none of the {length} of {card.name}"
        raise ContextLengthExceeded("prompt", reason, num_taken, length - 1, length)
    return SourcePrompt((PLACEHOLDER,) * spans[-1].stop + tokens, spans, content, num_left)


def read_transcript(raw: GenerateRequest, card: ModelCard, encode: Callable[[int], tuple[int, ...]]) -> SourcePrompt:
    """The prompt of a request for the times of a transcript, which is its end; `encode` as in `read_source`.

    Raises InvalidRequest.
    """
    source = card.source
    check_can(card, Capability.ALIGN, is_taken=source is not None and source.source == "speech")
    assert source is not None
    check_audio(raw, card)
    tokens, content = encode(source.most_tokens), EncoderContent.of(raw.audio, ContentKind.SPEECH)
    spans = source_spans(content.digest, source.most_rows)
    num_taken = spans[-1].stop + len(tokens)
    if num_taken > card.max_model_len:
        reason = f"takes {num_taken} positions with the encoder's input, of {card.max_model_len} of {card.name}"
        raise ContextLengthExceeded("prompt", reason, num_taken, card.max_model_len, card.max_model_len)
    return SourcePrompt((PLACEHOLDER,) * spans[-1].stop + tokens, spans, content, 0)


def check_audio(raw: GenerateRequest, card: ModelCard) -> None:
    """Raises InvalidRequest for a request without audio, or with what can't be audio."""
    if not raw.audio:
        raise InvalidRequest("audio", f"is missing: {card.name} writes speech down, see /v1/audio/transcriptions")
    if len(raw.audio) > MAX_AUDIO_BYTES or len(raw.audio) % 2:
        raise InvalidRequest("audio", f"has {len(raw.audio)} bytes: 16-bit samples, at most {MAX_AUDIO_BYTES} bytes")


def refuse_audio(raw: GenerateRequest, card: ModelCard) -> None:
    """Raises UnsupportedRequest for audio, which the model does not take."""
    if raw.audio:
        check_can(card, Capability.TRANSCRIBE, is_taken=False)
