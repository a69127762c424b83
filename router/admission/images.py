"""Checks a request's images before anything is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import InvalidRequest
from baton.messages.capabilities import Capability
from baton.messages.generation import GenerateRequest, ModelCard
from baton.model_formats.images import ImageLimits
from baton.text.image_prompts import FIELD, ImagePrompts, PromptImage
from router.admission.capable import check_can


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
