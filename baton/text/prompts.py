"""Prompts that are more than a text: with images, for speech, and around a gap (fill-in-the-middle, FIM).

Images: the text that stands for one, and the positions that its rows take. Speech: the special tokens that say what
the decoder is to write.

Models that were trained to write the middle of a text have special tokens around what is before and behind it. Which
they are is found by the tokenizer's added tokens. llama.cpp's `/infill` orders the texts in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import ConfigError, InvalidRequest
from baton.messages.request_limits import MAX_IMAGE_SPANS, MAX_LOGIT_BIAS
from baton.messages.spans import PLACEHOLDER, EncoderContent, Span
from baton.model_formats.audio import MOST_SAMPLES
from baton.model_formats.encoder_decoders import read_encoder_decoder
from baton.model_formats.files import read_object
from baton.model_formats.images import ImageFamily, ImageLayout, ImageLimits, UnusableImage, image_family, image_size
from baton.text.detokenizer import TextCodec

FIELD = "images"


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image of a prompt, and how it appears there."""

    content: EncoderContent
    layout: ImageLayout


class ImagePrompts:
    """Reads images, and finds their places in prompts. May be used from several threads."""

    def __init__(self, family: ImageFamily, image_token_id: int) -> None:
        """`image_token_id`: the id of the family's image token."""
        self._family = family
        self._image_token_id = image_token_id

    @classmethod
    def load(cls, model_dir: Path) -> ImagePrompts | None:
        """The rules of a model directory; None for a model that takes no images. Raises ConfigError."""
        family = image_family(model_dir)
        if family is None:
            return None
        token_id = read_object(model_dir / "config.json").get("image_token_id")
        if type(token_id) is not int or token_id < 0:
            raise ConfigError(f"{model_dir} has no image_token_id in its config.json; copy it again")
        return cls(family, token_id)

    def read(self, images: Sequence[bytes], limits: ImageLimits) -> Sequence[PromptImage]:
        """The images of a prompt, of which only the headers are read. Raises InvalidRequest for one out of bounds."""
        return [self._read(data, limits, index, len(images)) for index, data in enumerate(images)]

    def _read(self, data: bytes, limits: ImageLimits, index: int, count: int) -> PromptImage:
        try:
            return PromptImage(EncoderContent.of(data), self._family.layout(*image_size(data, limits)))
        except UnusableImage as error:
            which = "" if count == 1 else f"number {index} "
            raise InvalidRequest(FIELD, f"{which}can't be used: {error}") from None

    def expanded(self, text: str, images: Sequence[PromptImage]) -> str:
        """The text with what stands for each image in place of its image token.

        Raises InvalidRequest unless the text has as many image tokens as there are images.
        """
        token = self._family.image_token
        before, *behind = text.split(token)
        if len(behind) != len(images):
            raise InvalidRequest(FIELD, f"are {len(images)}, and the prompt has {token} {len(behind)} times")
        return before + "".join(image.layout.text + rest for image, rest in zip(images, behind, strict=True))

    def with_spans(
        self, token_ids: Sequence[int], images: Sequence[PromptImage]
    ) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        """The prompt with placeholders at the positions of images' rows, and these positions.

        Raises InvalidRequest unless the prompt has an image token for each row of the images.
        """
        ids = list(token_ids)
        places = [position for position, token_id in enumerate(ids) if token_id == self._image_token_id]
        num_rows = sum(image.layout.num_rows for image in images)
        if len(places) != num_rows:
            raise InvalidRequest(
                FIELD, f"have {num_rows} rows, and the prompt has the token {self._image_token_id} {len(places)} times"
            )
        spans: list[Span] = []
        taken = 0
        for image in images:
            spans += _spans_of(image, places[taken : taken + image.layout.num_rows])
            taken += image.layout.num_rows
        if len(spans) > MAX_IMAGE_SPANS:
            raise InvalidRequest(FIELD, f"have rows in {len(spans)} places; at most {MAX_IMAGE_SPANS} are taken")
        for position in places:
            ids[position] = PLACEHOLDER
        return tuple(ids), tuple(spans)


def _spans_of(image: PromptImage, places: Sequence[int]) -> Sequence[Span]:
    """The spans of one image, whose rows take these places."""
    grid, digest = image.layout.grid, image.content.digest
    spans, first = [], 0
    for row in range(1, len(places) + 1):
        if row == len(places) or places[row] != places[row - 1] + 1:
            columns = 0 if grid is None else grid[1]
            spans.append(Span(places[first], row - first, digest, is_encoded=True, first_row=first, columns=columns))
            first = row
    if grid is not None and len(spans) > 1:
        raise InvalidRequest(FIELD, "lie in a grid, and the image tokens of one don't follow each other")
    return spans


SAMPLES_PER_ROW = 320
"""Samples for each row of the encoder: two frames of 10 ms."""
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_SPECIAL = re.compile(r"<\|.*\|>")


@dataclass(frozen=True, slots=True)
class SpeechPrompts:
    """The tokens of one model for speech."""

    start: int
    """`<|startoftranscript|>`."""
    no_timestamps: int
    """`<|notimestamps|>`."""
    transcribe: int | None
    """`<|transcribe|>`; None: the model knows English alone and has one task."""
    translate: int | None
    """`<|translate|>`, into English."""
    previous: int | None
    """`<|startofprev|>`, before the text that came before."""
    languages: Mapping[str, int]
    """The token of each language, by its code (ISO 639-1, or 639-2 for those without one); empty: English alone."""
    suppressed: Sequence[int]
    """Tokens that are never written, such as brackets and the special ones above."""
    special: frozenset[int]
    """The tokens that are no text."""
    max_length: int
    """The most tokens of prompt and text together."""
    most_samples: int = MOST_SAMPLES
    """The most samples that the encoder hears; it would leave out what comes behind them."""
    aligns: bool = False
    """Whether generation_config.json names the heads that say when words are spoken (`alignment_heads`)."""

    @classmethod
    def load(cls, model_dir: Path, tokens: Mapping[int, str]) -> SpeechPrompts | None:
        """The tokens of a model directory; None for a model of another kind. Raises ConfigError.

        `tokens`: all of its tokenizer, by id.
        """
        config = read_object(model_dir / "config.json")
        shape = read_encoder_decoder(model_dir, config)
        if shape is None or shape.source != "speech":
            return None
        path = model_dir / "generation_config.json"
        generation = read_object(path) if path.is_file() else config
        special = {text: token for token, text in tokens.items() if _SPECIAL.fullmatch(text)}
        languages = {match[1]: token for text, token in special.items() if (match := _LANGUAGE.fullmatch(text))}
        # Tokenizers of models for English alone may have the tokens of languages, too.
        if generation.get("is_multilingual") is False:
            languages = {}

        def required(text: str) -> int:
            if text not in special:
                raise ConfigError(f"{model_dir} has no token {text} in its tokenizer.json; copy it again")
            return special[text]

        if config.get("max_target_positions") is None:
            raise ConfigError(f"{model_dir} has no max_target_positions in its config.json; copy it again")
        return cls(
            start=required("<|startoftranscript|>"),
            no_timestamps=required("<|notimestamps|>"),
            transcribe=required("<|transcribe|>") if languages else None,
            translate=special.get("<|translate|>") if languages else None,
            previous=special.get("<|startofprev|>"),
            languages=languages,
            suppressed=_suppressed(generation, config, path),
            special=frozenset(special.values()),
            max_length=shape.most_tokens,
            aligns=bool(generation.get("alignment_heads")),
            most_samples=min(MOST_SAMPLES, shape.most_rows * SAMPLES_PER_ROW),
        )

    def prompt(self, language: str, *, translates: bool = False, before: Sequence[int] = ()) -> tuple[int, ...]:
        """The prompt for speech in a language. `before`: the tokens of text that came before, whose end is used."""
        # The text before has at most half of the room, as in OpenAI's Whisper.
        text = [token for token in before if token not in self.special][-(self.max_length // 2 - 1) :]
        task = self.translate if translates else self.transcribe
        ids = [self.start, self.languages.get(language), task, self.no_timestamps]
        if text and self.previous is not None:
            ids = [self.previous, *text, *ids]
        return tuple(token for token in ids if token is not None)


def _suppressed(generation: Mapping[str, Any], config: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    listed = generation.get("suppress_tokens") or ()
    if not isinstance(listed, Sequence) or any(type(token) is not int for token in listed):
        raise ConfigError(f"{path}: suppress_tokens must be token ids; copy it again")
    vocab_size = config.get("vocab_size")
    tokens = tuple(token for token in dict.fromkeys(listed) if 0 <= token < (vocab_size or 0))
    if len(tokens) > MAX_LOGIT_BIAS:
        raise ConfigError(f"{path}: suppress_tokens has {len(tokens)} tokens; at most {MAX_LOGIT_BIAS} are taken")
    return tokens


_MARKERS = (
    # Qwen2.5-Coder, CodeGemma
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder, StarCoder2, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # SantaCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    # DeepSeek-Coder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)
"""For each family of models the tokens before the first text, before the second one, and before what the model writes.

CodeLlama's are pieces of its vocabulary, no added tokens, and Mistral's are in the tokenizers of models that were not
trained for it, too: neither is here.
"""


@dataclass(frozen=True, slots=True)
class GapTokens:
    """The ids of a model's tokens for fill-in-the-middle."""

    prefix: int
    suffix: int
    middle: int

    def around(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """The token ids of a prompt from those of both texts."""
        return [self.prefix, *before, self.suffix, *after, self.middle]


def find_gap_tokens(tokenizer: TextCodec) -> GapTokens | None:
    """The tokens for fill-in-the-middle that a tokenizer has; None if it has not all three of a family."""
    for markers in _MARKERS:
        ids = [token for text in markers if (token := tokenizer.added_id(text)) is not None]
        if len(ids) == len(markers):
            return GapTokens(*ids)
    return None
