"""The encoder of an image model: from an image's numbers to the rows that replace its tokens' embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton.runner.backends.operations import Operations
from baton.runner.images.patch_product import replace_patch_convolutions
from baton.runner.model.layers import replace_products
from baton.runner.model.mapped_files import MappedFiles
from baton.runner.model.transformer import on_device, on_host
from baton.runner.model.weights import LoadedModel
from baton.runner.torch_threads import one_thread


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
        with self._where(), torch.inference_mode(), one_thread():
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
