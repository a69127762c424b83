"""How images appear in the prompts of the models that take them: in which text, and as how many rows. No pixels."""

from baton.model_formats.images.families import (
    IMAGE_FAMILIES,
    ImageFamily,
    ImageLayout,
    UnusableImage,
    image_family,
    read_processor,
)

__all__ = ["IMAGE_FAMILIES", "ImageFamily", "ImageLayout", "UnusableImage", "image_family", "read_processor"]
