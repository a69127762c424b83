"""Decodes images and prepares them for a model's encoder, within bounds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from baton.errors import ConfigError
from baton.model_formats.images import UnusableImage, image_family
from baton.model_formats.images.encoded import open_image, orientation_of

if TYPE_CHECKING:
    from PIL.Image import Image

_ROWS_AT_ONCE = 64


class ImageProcessor:
    """Makes an encoder's input of an encoded image (PNG, JPEG, WebP or GIF). May be called from any thread.

    transformers' own processor computes it, always with Pillow: torchvision's functions give other numbers.
    """

    def __init__(self, directory: Path) -> None:
        """Read the processor's configuration. Raises ConfigError."""
        from transformers import AutoImageProcessor

        family = image_family(directory)
        if family is None:
            raise ConfigError(f"{directory} is no model that takes images")
        self.family = family
        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(
                directory, backend="pil", local_files_only=True, trust_remote_code=False
            )
        # transformers has no list of what it raises for a configuration that it does not expect.
        except Exception as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"the image processor in {directory} can't be made ({said:.200}); copy it again"
            ) from error

    def pixels(self, data: bytes) -> Mapping[str, npt.NDArray[Any]]:
        """The encoder's input, by the names of its arguments. `data`: checked by `image_size` before.

        Raises UnusableImage for an image that can't be decoded.
        """
        image = decode_image(data)
        made = self._processor([image], return_tensors="np")
        return {name: np.asarray(made[name]) for name in self._processor.model_input_names if name in made}


def decode_image(data: bytes) -> Image:
    """The pixels of an encoded image as it is to be shown, in RGB: transparent parts are on white.

    Raises UnusableImage for one that is damaged.
    """
    from PIL import Image

    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    try:
        with open_image(data) as opened:
            # Before the pixels are decoded, as routers do it: a PNG may have EXIF behind them.
            turn = turns.get(orientation_of(opened))
            image = _in_rgb(opened)
            return image if turn is None else image.transpose(turn)
    except UnusableImage:
        raise
    # Pillow has no list of what its decoders raise.
    except Exception as error:
        raise UnusableImage(f"it can't be decoded ({type(error).__name__})") from error


def _in_rgb(image: Image) -> Image:
    is_deep = image.mode.startswith(("I", "F"))  # greys of 16 bits, which Pillow would clip to 255
    if not is_deep and not image.has_transparency_data:
        return image.convert("RGB")
    from PIL import Image

    found = Image.new("RGB", image.size)
    # A few rows at a time: what is computed on the way has many times the bytes of the result.
    for top in range(0, image.height, _ROWS_AT_ONCE):
        rows = image.crop((0, top, image.width, min(image.height, top + _ROWS_AT_ONCE)))
        rows = _eight_bits(rows) if is_deep else rows.convert("RGBA")
        white = Image.new("RGBA", rows.size, "white")
        found.paste(Image.alpha_composite(white, rows.convert("RGBA")).convert("RGB"), (0, top))
    return found


def _eight_bits(image: Image) -> Image:
    """Greys of 16 bits in 8 bits: the upper half of each, as Pillow takes it of colours."""
    from PIL import Image

    values = np.asarray(image)
    grey = Image.fromarray((np.clip(values, 0, 0xFFFF).astype(np.uint16) >> 8).astype(np.uint8)).convert("LA")
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return grey
