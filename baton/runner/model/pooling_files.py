"""What a model directory says of pooling: its architecture, its labels, and the files of sentence-transformers.

Needs no torch: routers read it, too. Of sentence-transformers' modules pooling and normalisation are known; a directory
with others is refused, since its vectors would be wrong without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from baton.messages.pooling import Activation, ModelPooling, Pooling
from baton.model_formats.files import read_json, read_object

ENCODER_TYPES = frozenset({"bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra", "modernbert"})
"""The model types that are computed as encoders: each token attends to all of its text."""
_POSITIONS_BEHIND_PADDING = frozenset({"roberta", "xlm-roberta", "camembert"})
"""Encoders whose first position is the one behind the padding token's id."""
_CLASSIFIER = "ForSequenceClassification"
_MODES = {
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
}
_KINDS = {"cls": Pooling.CLS, "mean": Pooling.MEAN, "lasttoken": Pooling.LAST}
_ACTIVATIONS: Mapping[str, Activation] = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}
"""torch's names."""
_MAX_LABELS = 4096
_MAX_LABEL_CHARS = 256


def read_pooling(directory: Path) -> ModelPooling:
    """What the files of a model directory say; raises ConfigError for what is not understood."""
    config = read_object(directory / "config.json")
    labels = classifier_labels(config, directory) if is_classifier(config) else ()
    encodes = is_encoder(config)
    default, normalizes = _sentence_modules(directory) or (Pooling.CLS if encodes else Pooling.LAST, True)
    dimensions = config.get("matryoshka_dimensions")
    return ModelPooling(
        default=default,
        normalizes=normalizes,
        is_matryoshka=bool(config.get("is_matryoshka") or dimensions),
        matryoshka_dimensions=_dimensions(dimensions, directory),
        is_encoder=encodes,
        generates=not (encodes or labels),
        labels=labels,
        activation=_activation(config, len(labels), directory) if labels else "softmax",
        has_token_types=encodes and _number(config.get("type_vocab_size")) > 1,
        first_position=first_position(config) if encodes else 0,
        max_length=_max_length(config, directory) if encodes else 0,
    )


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a model with this config.json is computed as an encoder."""
    return config.get("model_type") in ENCODER_TYPES and not config.get("is_decoder")


def is_encoder_directory(directory: Path) -> bool:
    """Whether a model directory is of an encoder; False also for one that can't be read, which others refuse."""
    try:
        return is_encoder(read_object(directory / "config.json"))
    except ConfigError:
        return False


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether a model with this config.json has a head for labels."""
    return any(str(name).endswith(_CLASSIFIER) for name in _list(config.get("architectures")))


def is_decoder_of_both_ways(config: Mapping[str, Any]) -> bool:
    """Whether a decoder with this config.json, or its text part, was trained to attend to the tokens behind, too."""
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, dict) else [config]
    return any(
        part.get("use_bidirectional_attention") in (True, "all") or part.get("is_causal") is False for part in parts
    )


def pooling_fields(directory: Path) -> list[bytes]:
    """The files that change vectors beside config.json, for the model's fingerprint; empty where there are none.

    Raises ConfigError for a modules.json that is not understood.
    """
    pooling = _pooling_path(_modules(directory)) or "1_Pooling"
    names = ("modules.json", f"{pooling}/config.json", "sentence_bert_config.json")
    return [(directory / name).read_bytes() for name in names if (directory / name).is_file()]


def first_position(config: Mapping[str, Any]) -> int:
    """The position of the first token in an encoder's table of positions."""
    if config.get("model_type") not in _POSITIONS_BEHIND_PADDING:
        return 0
    padding = config.get("pad_token_id")
    return 1 + (1 if padding is None else _number(padding))


def _max_length(config: Mapping[str, Any], directory: Path) -> int:
    """The most tokens of a text: as many as the model has positions for, and sentence-transformers takes."""
    longest = _number(config.get("max_position_embeddings")) - first_position(config)
    if longest < 2:
        raise ConfigError(f"{directory / 'config.json'} has no max_position_embeddings for two tokens; copy it again")
    file = directory / "sentence_bert_config.json"
    shorter = _number(read_object(file).get("max_seq_length")) if file.is_file() else 0
    return min(longest, shorter) if shorter > 1 else longest


def _sentence_modules(directory: Path) -> tuple[Pooling, bool] | None:
    """How sentence-transformers pools, and whether it normalises; None for a directory that is not of its layout."""
    modules = _modules(directory)
    kinds = list(map(_kind, modules))
    if unknown := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise ConfigError(
            f"{directory} makes its vectors with a module {unknown[0]!r:.80}, which is not supported: choose a model "
            "that pools and normalises alone"
        )
    path = _pooling_path(modules)
    if not path:
        return None
    return _pooling_mode(read_object(directory / path / "config.json"), directory / path), "Normalize" in kinds


def _modules(directory: Path) -> list[Mapping[str, Any]]:
    """The modules of sentence-transformers; empty for a directory that is not of its layout."""
    file = directory / "modules.json"
    if not file.is_file():
        return []
    modules = read_json(file)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ConfigError(f"{file} is not a list of modules; copy it again")
    path = _pooling_path(modules)
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise ConfigError(f"{file} names the path {path!r:.80}, which is not below its directory")
    return modules


def _kind(module: Mapping[str, Any]) -> str:
    return str(module.get("type", "")).rpartition(".")[2]


def _pooling_path(modules: Sequence[Mapping[str, Any]]) -> str:
    return next((str(module.get("path", "")) for module in modules if _kind(module) == "Pooling"), "")


def _pooling_mode(config: Mapping[str, Any], directory: Path) -> Pooling:
    mode = config.get("pooling_mode")
    kinds = [kind for name, kind in _MODES.items() if config.get(name) is True]
    if isinstance(mode, str) and mode in _KINDS:
        kinds = [_KINDS[mode]]
    others = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(kinds) != 1 or len(others) > 1:
        raise ConfigError(
            f"{directory} pools by {', '.join(others) or mode or 'nothing'}; cls, mean or last is supported"
        )
    return kinds[0]


def classifier_labels(config: Mapping[str, Any], directory: Path) -> tuple[str, ...]:
    """The labels of a classification head; raises ConfigError for too many, or too long ones."""
    named = config.get("id2label")
    if isinstance(named, dict):
        labels = [str(named.get(str(index), f"LABEL_{index}")) for index in range(len(named))]
    else:
        # The number of transformers' PretrainedConfig.
        count = config.get("num_labels", 2)
        if not isinstance(count, int) or not 1 <= count <= _MAX_LABELS:
            raise ConfigError(f"{directory / 'config.json'} has a num_labels of {count!r:.40}; at most {_MAX_LABELS}")
        labels = [f"LABEL_{index}" for index in range(count)]
    if not 1 <= len(labels) <= _MAX_LABELS or any(len(label) > _MAX_LABEL_CHARS for label in labels):
        raise ConfigError(
            f"{directory / 'config.json'} has {len(labels)} labels; 1 to {_MAX_LABELS} of at most {_MAX_LABEL_CHARS} "
            "letters are read"
        )
    return tuple(labels)


def _activation(config: Mapping[str, Any], num_labels: int, directory: Path) -> Activation:
    """What vLLM applies to the outputs: what the model says, otherwise sigmoid for one label, softmax for several.

    A function that is named counts more than the kind of problem. Raises ConfigError for a name that is not known.
    """
    of_cross_encoder = config.get("sentence_transformers")
    named = of_cross_encoder.get("activation_fn") if isinstance(of_cross_encoder, dict) else None
    named = str(named or config.get("sbert_ce_default_activation_function") or "")
    if named:
        known = _ACTIVATIONS.get(named.rpartition(".")[2])
        if known is None:
            raise ConfigError(
                f"{directory / 'config.json'} names the activation {named!r:.80}, which is not supported: "
                f"{', '.join(_ACTIVATIONS)} are"
            )
        return known
    match config.get("problem_type"):
        case "regression":
            return "identity"
        case "multi_label_classification":
            return "sigmoid"
    return "sigmoid" if num_labels == 1 else "softmax"


def _dimensions(value: Any, directory: Path) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(n) is int and n > 0 for n in value) or len(value) > 1024:
        raise ConfigError(f"{directory / 'config.json'} has matryoshka_dimensions that are no list of lengths")
    return tuple(value)


def _number(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
