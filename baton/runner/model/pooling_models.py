"""The classes of models that make vectors: encoders, and decoders with a head for labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from baton.errors import ConfigError
from baton.runner.model.pooling_files import classifier_labels, is_classifier

T = TypeVar("T")
_SCORE = "score.weight"
"""The head's weight in checkpoints of decoders with a head for labels."""


def encoder_class(directory: object, config: Any, architectures: Mapping[str, Any]) -> Any:
    """The class of an encoder: with its classification head if config.json (`architectures`) names one."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_MAPPING

    known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING if is_classifier(architectures) else MODEL_MAPPING
    if type(config) not in known:
        raise ConfigError(
            f"{directory} is of type {config.model_type!r}, which this version of transformers can't load"
        )
    model_class = known[type(config)]
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ConfigError(
            f"{directory} is of type {config.model_type!r}, which is not supported: its attention can't be exchanged"
        )
    if getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        raise ConfigError(
            f"{directory} has positions of type {config.position_embedding_type!r}: only absolute ones are"
        )
    return model_class


def classifier_class(model_class: Any, config: Any, architectures: Mapping[str, Any], directory: Any) -> Any:
    """The class of a causal language model whose head gives labels in place of the next token's logits.

    transformers' own classes pool inside of their loop; here pooling is the runner's, so the head takes the place of
    the language model's, and everything that computes logits computes the labels' outputs.
    """
    labels = classifier_labels(architectures, directory)
    config.tie_word_embeddings = False

    def build(self: Any, config: Any, *arguments: Any, **named: Any) -> None:
        model_class.__init__(self, config, *arguments, **named)
        size = self.get_output_embeddings().in_features
        self.set_output_embeddings(nn.Linear(size, len(labels), bias=False))

    members = {"__init__": build, "__module__": model_class.__module__, "_tied_weights_keys": {}, "has_labels": True}
    return type(model_class.__name__, (model_class,), members)


def with_head_renamed(skeleton: Any, tensors: Mapping[str, T]) -> Mapping[str, T]:
    """The tensors of a checkpoint, that of a head for labels under the name that `classifier_class` gives it.

    Raises ConfigError for a head with a bias, which transformers' have not.
    """
    if not getattr(type(skeleton), "has_labels", False) or _SCORE not in tensors:
        return tensors
    if "score.bias" in tensors:
        raise ConfigError("the classification head has a bias, which is not supported; choose another model")
    head = skeleton.get_output_embeddings()
    name = next(name for name, part in skeleton.named_modules() if part is head)
    others = {key: tensor for key, tensor in tensors.items() if key not in (_SCORE, f"{name}.weight")}
    return {**others, f"{name}.weight": tensors[_SCORE]}


def is_unused(name: str, model_class: Any) -> bool:
    """Whether a parameter that a checkpoint lacks changes no result: the pooler of an encoder without a head."""
    return name.startswith("pooler.") and model_class.__name__.endswith("Model")
