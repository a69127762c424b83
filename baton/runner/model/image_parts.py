"""The parts of a model that takes images: the text part as a causal language model of its own, and what is left.

transformers has no such class: its image models call the text model with rows that the encoder's are already part of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from baton.model_formats.images import IMAGE_FAMILIES


@dataclass(frozen=True, slots=True)
class TextOutput:
    """The output of a causal language model, of which Baton reads the logits alone."""

    logits: torch.Tensor
    """[1, rows, vocabulary]."""


class TextPart(nn.Module):
    """A decoder and its head: what transformers' causal language models are for Baton.

    The decoder is taken out of the image model, which keeps everything else.
    """

    def __init__(self, image_model: Any) -> None:
        super().__init__()
        self.config = image_model.config.get_text_config()
        self.model = image_model.get_decoder()
        self.decoder_path = next(path for path, part in image_model.named_modules() if part is self.model)
        """The name of `model` in the image model."""
        self.lm_head = image_model.get_output_embeddings()

    def get_input_embeddings(self) -> nn.Module:
        """The module that makes rows of token ids."""
        embedding: nn.Module = self.model.get_input_embeddings()
        return embedding

    def set_input_embeddings(self, embedding: nn.Module) -> None:
        self.model.set_input_embeddings(embedding)

    def get_output_embeddings(self) -> nn.Module:
        """The module that computes logits."""
        head: nn.Module = self.lm_head
        return head

    def set_output_embeddings(self, head: nn.Module) -> None:
        self.lm_head = head

    def forward(self, *, logits_to_keep: torch.Tensor, **inputs: Any) -> TextOutput:
        """Logits of the rows `logits_to_keep`; the other arguments are those of the decoder."""
        hidden = self.model(**inputs).last_hidden_state
        return TextOutput(self.lm_head(hidden[:, logits_to_keep]))


class ImagePart(nn.Module):
    """An image model without its text part: from what a processor made of one image to rows, [rows, hidden size]."""

    def __init__(self, image_model: Any) -> None:
        super().__init__()
        self._image_model = image_model

    def get_output_embeddings(self) -> None:
        """There is no head."""

    def forward(self, **image: torch.Tensor) -> torch.Tensor:
        features = self._image_model.get_image_features(**image, return_dict=True).pooler_output
        return torch.cat(list(features))


def takes_images(config: Any) -> bool:
    """Whether a model with this configuration is of a family whose images Baton serves."""
    return config.model_type in IMAGE_FAMILIES


def divide_image_model(image_model: Any) -> tuple[TextPart, ImagePart]:
    """The two parts of an image model, whose weights they take over."""
    text = TextPart(image_model)
    image_model.set_decoder(nn.Identity())
    image_model.set_output_embeddings(None)
    return text, ImagePart(image_model)
