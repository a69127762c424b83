"""From an encoded image to the rows that replace its tokens' embeddings."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import numpy.typing as npt

from baton.errors import InvalidRequest
from baton.messages.spans import EncoderContent
from baton.model_formats.images import UnusableImage
from baton.model_formats.images.encoded import ImageLimits, image_size
from baton.runner.images.image_encoder import ImageEncoder
from baton.runner.images.pixels import ImageProcessor


class ImageInputs:
    """The image processor and the encoder of one model. Called from one thread at a time."""

    def __init__(self, processor: ImageProcessor, encoder: ImageEncoder, limits: ImageLimits) -> None:
        """`limits`: bounds of an image, checked once more before it is decoded."""
        self._processor = processor
        self._encoder = encoder
        self._limits = limits

    @property
    def numerics(self) -> str:
        """A name for what decides the pixels of an image, beside the model's files."""
        return f"pillow-{version('pillow')}-transformers-{version('transformers')}"

    def rows(self, content: EncoderContent, num_rows: int) -> npt.NDArray[np.float32]:
        """The rows of an image, float32 [num_rows, width]. Raises InvalidRequest for one that can't be used."""
        try:
            image_size(content.data, self._limits)
            made = self._processor.pixels(content.data)
        except UnusableImage as error:
            raise InvalidRequest("images", f"can't be used: {error}") from error
        try:
            rows = self._encoder.encode(made)
        except ArithmeticError as error:
            raise InvalidRequest("images", f"can't be used: {error}") from error
        if len(rows) != num_rows:
            raise InvalidRequest("images", f"can't be used: one has {len(rows)} rows, and its prompt {num_rows}")
        return rows
