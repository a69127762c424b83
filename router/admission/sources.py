"""The input of a model's encoder as the beginning of a prompt, for models with an encoder and a decoder."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from baton.errors import ContextLengthExceeded, InvalidRequest
from baton.messages.capabilities import Capability
from baton.messages.generation import GenerateRequest, ModelCard
from baton.messages.request_limits import MAX_AUDIO_BYTES
from baton.messages.spans import PLACEHOLDER, ContentKind, EncoderContent, Span, source_spans
from baton.model_formats.encoder_decoders import EncoderDecoder
from router.admission.capable import check_can


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
