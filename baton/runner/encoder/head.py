"""The classification heads of encoders: what is pooled, and the layers behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from baton.errors import ConfigError
from baton.messages.pooling import Pooling


@dataclass(frozen=True, slots=True)
class ClassificationHead:
    """The head of one `…ForSequenceClassification` of transformers."""

    pooling: Pooling
    """The hidden states that it reads."""
    last_layer: nn.Module
    """The layer that gives a number for each label, before products are replaced: its results are float32."""
    outputs: Callable[[torch.Tensor], torch.Tensor]
    """Pooled hidden states [n, size] to the outputs [n, labels]."""

    @classmethod
    def of(cls, module: Any, config: Any) -> ClassificationHead:
        """The head of a loaded module; raises ConfigError for one of another build."""
        base = getattr(module, module.base_model_prefix)
        classifier: Any = getattr(module, "classifier", None)
        if isinstance(getattr(classifier, "out_proj", None), nn.Linear):
            # Roberta, Electra: the classifier takes hidden states [n, tokens, size], and the first token of each.
            return cls(Pooling.CLS, classifier.out_proj, lambda rows: module.classifier(rows[:, None]))
        if not isinstance(classifier, nn.Linear):
            raise ConfigError(f"{type(module).__name__} has no classifier that is supported; choose another model")
        if getattr(base, "pooler", None) is not None:  # Bert

            def of_bert(rows: torch.Tensor) -> torch.Tensor:
                found: torch.Tensor = module.classifier(base.pooler(rows[:, None]))
                return found

            return cls(Pooling.CLS, classifier, of_bert)
        if isinstance(getattr(module, "pre_classifier", None), nn.Linear):  # DistilBert

            def of_distilbert(rows: torch.Tensor) -> torch.Tensor:
                found: torch.Tensor = module.classifier(torch.relu(module.pre_classifier(rows)))
                return found

            return cls(Pooling.CLS, classifier, of_distilbert)
        kinds = {"cls": Pooling.CLS, "mean": Pooling.MEAN}
        kind = kinds.get(getattr(config, "classifier_pooling", ""))
        if kind is None or getattr(module, "head", None) is None:
            raise ConfigError(f"{type(module).__name__} has a head that is not supported; choose another model")
        return cls(kind, classifier, lambda rows: module.classifier(module.head(rows)))  # ModernBert
