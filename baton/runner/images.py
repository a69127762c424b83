"""Models that take images beside text: from an encoded image to the rows that replace the embeddings of its tokens.

Images are decoded and prepared within bounds, and encoded one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from baton.errors import ConfigError, InvalidRequest
from baton.messages.request_limits import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS
from baton.messages.spans import EncoderContent
from baton.model_formats.images import (
    ImageLimits,
    UnusableImage,
    image_family,
    image_size,
    open_image,
    orientation_of,
)
from baton.runner.backends.operations import Operations
from baton.runner.model.cached_model import on_device, on_host
from baton.runner.model.comparison import children_of
from baton.runner.model.layers import PackedLinear, replace_products
from baton.runner.model.model_classes import first_line
from baton.runner.model.stored.mapped_files import MappedFiles
from baton.runner.model.weights import LoadedModel
from baton.runner.shared_by_loaders import row_numerics_of
from baton.runner.torch_threads import torch_threads

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
            said = first_line(error)
            raise ConfigError(f"the image processor in {directory} can't be made ({said}); copy it again") from error

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

    canvas = Image.new("RGB", image.size)
    # A few rows at a time: what is computed on the way has many times the bytes of the result.
    for top in range(0, image.height, _ROWS_AT_ONCE):
        rows = image.crop((0, top, image.width, min(image.height, top + _ROWS_AT_ONCE)))
        rows = _eight_bits(rows) if is_deep else rows.convert("RGBA")
        white = Image.new("RGBA", rows.size, "white")
        canvas.paste(Image.alpha_composite(white, rows.convert("RGBA")).convert("RGB"), (0, top))
    return canvas


def _eight_bits(image: Image) -> Image:
    """Greys of 16 bits in 8 bits: the upper half of each, as Pillow takes it of colours."""
    from PIL import Image

    values = np.asarray(image)
    grey = Image.fromarray((np.clip(values, 0, 0xFFFF).astype(np.uint16) >> 8).astype(np.uint8)).convert("LA")
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return grey


class PatchProduct(nn.Module):
    """A convolution as a product on a packed weight: x [B, C, …] to [B, N, …], with one output for each window."""

    def __init__(self, operations: Operations, convolution: nn.Conv2d | nn.Conv3d) -> None:
        super().__init__()
        weight = convolution.weight.detach()
        self._window = tuple(convolution.kernel_size)
        self._product = PackedLinear(operations, weight.flatten(1).contiguous(), convolution.bias, weight.dtype)
        self._dtype = weight.dtype

    @property
    def weight(self) -> torch.Tensor:
        """A tensor without numbers, by whose dtype callers convert their input."""
        return torch.empty(0, dtype=self._dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        num_axes = len(self._window)
        patches = x
        for axis, size in enumerate(self._window):
            patches = patches.unfold(2 + axis, size, size)
        # [B, C, windows…, window…] to [B, windows…, C, window…]
        patches = patches.movedim(1, 1 + num_axes)
        out: torch.Tensor = self._product(patches.flatten(1 + num_axes).contiguous())
        return out.movedim(-1, 1).contiguous()


def replace_patch_convolutions(module: nn.Module, operations: Operations) -> None:
    """Replace every convolution of this kind in place."""
    for parent, name, child in children_of(module):
        if isinstance(child, nn.Conv2d | nn.Conv3d) and _cuts_into_patches(child):
            setattr(parent, name, PatchProduct(operations, child))


def _cuts_into_patches(convolution: nn.Conv2d | nn.Conv3d) -> bool:
    no_padding = convolution.padding == "valid" or not any(convolution.padding)
    dense = convolution.groups == 1 and all(dilation == 1 for dilation in convolution.dilation)
    return bool(no_padding and dense and convolution.stride == convolution.kernel_size)


class ImageEncoder:
    """Encodes one image at a time, so that its rows depend on nothing else. Called from one thread at a time.

    torch computes what is not a product of Baton's. On a CPU it has one thread: with several its functions would round
    differently at the borders of their shares. A GPU computes images on a stream of their own, beside the steps.
    """

    def __init__(self, model: LoadedModel, operations: Operations) -> None:
        """Pack the weights of `model.image_part`."""
        if model.image_part is None:
            raise ValueError(f"{model.architecture} takes no images")
        self._device = model.device
        self._stream: torch.cuda.Stream | None = None
        self._image_part = model.image_part.to(model.device)
        mapped = MappedFiles(model.checkpoint.weight_files)
        replace_patch_convolutions(self._image_part, operations)
        replace_products(self._image_part, operations, 1, mapped.release)

    def encode(self, image: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
        """The rows of one image, float32 [rows, hidden size], from what its processor made of it.

        Raises ArithmeticError for rows that are not finite.
        """
        with self._where(), torch.inference_mode(), torch_threads(1):
            given = {name: torch.from_numpy(array).to(self._device) for name, array in image.items()}
            rows = on_host(self._image_part(**given))
        if not np.isfinite(rows).all():
            raise ArithmeticError("the encoder made numbers of the image that are not finite")
        return rows

    @contextmanager
    def _where(self) -> Iterator[None]:
        if self._device.type != "cuda":
            yield
            return
        if self._stream is None:
            # Made by the thread that encodes, once all weights have been written.
            torch.cuda.synchronize(self._device)
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with on_device(self._device), torch.cuda.stream(self._stream):
            yield


class ImageInputs:
    """The image processor and the encoder of one model. Called from one thread at a time."""

    def __init__(self, processor: ImageProcessor, encoder: ImageEncoder, limits: ImageLimits) -> None:
        """`limits`: bounds of an image, checked once more before it is decoded."""
        self._processor = processor
        self._encoder = encoder
        self._limits = limits

    @classmethod
    def of(cls, model: LoadedModel, operations: Operations) -> Self:
        """Pack the weights of what encodes a model's images, within the bounds of all requests. Raises ConfigError."""
        processor = ImageProcessor(model.checkpoint.directory)
        encoder = ImageEncoder(model, operations)
        return cls(processor, encoder, ImageLimits(MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS))

    def row_numerics(self, model: LoadedModel, operations: Operations) -> str:
        """A name for all that decides the rows of an image, beside the model's files."""
        return f"{row_numerics_of(model.weights.treatment, operations)}/{self.numerics}"

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
