"""Prompts with images of one model: the text that stands for an image, and the positions that its rows take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError, InvalidRequest
from baton.messages.request_limits import MAX_IMAGE_SPANS
from baton.messages.spans import PLACEHOLDER, EncoderContent, Span
from baton.model_formats.files import read_object
from baton.model_formats.images import ImageFamily, ImageLayout, ImageLimits, UnusableImage, image_family, image_size

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
        return [self._read(data, limits, place, len(images)) for place, data in enumerate(images)]

    def _read(self, data: bytes, limits: ImageLimits, place: int, count: int) -> PromptImage:
        try:
            return PromptImage(EncoderContent.of(data), self._family.layout(*image_size(data, limits)))
        except UnusableImage as error:
            which = "" if count == 1 else f"number {place} "
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
        places = [place for place, token_id in enumerate(ids) if token_id == self._image_token_id]
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
        for place in places:
            ids[place] = PLACEHOLDER
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
