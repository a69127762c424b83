"""Which class of transformers a model directory is loaded as, and the parts of Baton's own that some have.

Encoders make vectors, and decoders may have a head for labels in place of tokens. Of a model that takes images the text
part becomes a causal language model of its own: transformers has no such class, since its image models call the text
model with rows that the encoder's are already part of. Of a model whose images or speech Baton can't encode all other
parts are left out before they have memory, and what remains must compute logits as the whole model does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from baton.errors import ConfigError
from baton.model_formats.encoder_decoders import has_encoder_and_decoder
from baton.model_formats.images import IMAGE_FAMILIES
from baton.model_formats.model_types import what_instead
from baton.runner.model.attention import ATTENTION_NAME, ENCODER_DECODER_ATTENTION, KINDS_WITHOUT_CACHE
from baton.runner.model.checkpoint import Checkpoint, check_file_numbers
from baton.runner.model.pooling_files import classifier_labels, is_classifier, is_decoder_of_both_ways, is_encoder
from baton.runner.model.stored.plan import CheckpointNames

T = TypeVar("T")
_KINDS_OF_LAYERS = {
    *("full_attention", "sliding_attention", "chunked_attention", "conv", "linear_attention", "hybrid"),
    *KINDS_WITHOUT_CACHE,
}
"""The layers that are served, by transformers' names; a hybrid one has attention and a state."""
_SELECTING = "indexed_attention"
"""Layers that select the keys to which they attend."""
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

    return derived_class(model_class, build, _tied_weights_keys={}, has_labels=True)


def derived_class(model_class: Any, build: Callable[..., None], **members: Any) -> Any:
    """A class of models that `build` makes, with these further members.

    Name and module are the model's, since transformers looks its table of conversions up by them.
    """
    own = {"__init__": build, "__module__": model_class.__module__, **members}
    return type(model_class.__name__, (model_class,), own)


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


def has_other_parts(config: Any) -> bool:
    """Whether of a model with this configuration the text part alone is served."""
    if config.is_encoder_decoder or takes_images(config):
        return False
    return config.get_text_config() is not config


class LeftOut(nn.Module):
    """Stands for a part that is not served, and has no weights."""


def with_text_alone(model_class: Any) -> Any:
    """The class of a model of which all parts but its decoder and the head are left out."""

    def build(self: Any, config: Any, *arguments: Any, **named: Any) -> None:
        model_class.__init__(self, config, *arguments, **named)
        self.left_out = _leave_out(self)

    return derived_class(model_class, build)


def with_image_part_alone(model_class: Any) -> Any:
    """The class of an image model of which the decoder and the head are left out."""

    def build(self: Any, config: Any, *arguments: Any, **named: Any) -> None:
        model_class.__init__(self, config, *arguments, **named)
        text = (self.get_decoder(), self.get_output_embeddings())
        self.left_out = tuple(path for path, part in self.named_modules() if any(part is one for one in text))
        for path in self.left_out:
            self.set_submodule(path, LeftOut())
        self.all_tied_weights_keys = {}

    return derived_class(model_class, build)


def _leave_out(model: Any) -> tuple[str, ...]:
    """Replace the other parts of a model that has no memory yet, and return their paths. Raises ConfigError."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    kept = [f"{path}." for path, part in model.named_modules() if part is decoder or part is head]
    if len(kept) < 2 or decoder is model or any(part is head for part in decoder.modules()):
        raise ConfigError(
            f"the text part of {type(model).__name__} can't be taken out of it, so models of type "
            f"{model.config.model_type!r} are not supported; {what_instead(model.config.model_type)}"
        )
    left: list[str] = []
    for path in [f"{path}." for path, _ in model.named_modules() if path]:
        is_kept = any(path.startswith(part) or part.startswith(path) for part in kept)
        if not is_kept and not path.startswith(tuple(left)):
            left.append(path)
    for path in left:
        model.set_submodule(path[:-1], LeftOut())
    gone, ties = tuple(left), model.all_tied_weights_keys
    # transformers would look for parameters that are not there.
    model.all_tied_weights_keys = {
        key: source for key, source in ties.items() if not (key.startswith(gone) or source.startswith(gone))
    }
    return tuple(path[:-1] for path in left)


def without_left_out(skeleton: Any, tensors: Mapping[str, T]) -> Mapping[str, T]:
    """The tensors of a checkpoint, without those of parts that are left out."""
    left = tuple(f"{path}." for path in getattr(skeleton, "left_out", ()))
    if not left:
        return tensors
    names = CheckpointNames(skeleton)
    return {name: tensor for name, tensor in tensors.items() if not names.parameter_of(name)[0].startswith(left)}


def text_part_of(model: Any) -> nn.Module:
    """The decoder and the head of a model whose other parts are left out, as a causal language model.

    Some models change the logits behind their head (soft caps), and some don't although their text model by itself
    would, so both ways are tried. Raises ConfigError for a model that makes its logits in a third way.
    """
    refusal = f"models of type {model.config.model_type!r} are not supported: {type(model).__name__} "
    instead = what_instead(model.config.model_type)
    try:
        expected = _logits_behind_decoder(model, model.get_decoder())
        for make in (TextPart, _causal_model_of):
            part = make(model)
            found = None if part is None else _logits_behind_decoder(part, model.get_decoder())
            if expected is not None and found is not None and torch.equal(expected, found):
                return part
    # transformers has no list of what it raises.
    except Exception as error:
        said = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"{refusal}fails with a text alone ({said}); {instead}") from error
    raise ConfigError(f"{refusal}makes its logits of a text otherwise than its decoder and its head do; {instead}")


def _causal_model_of(model: Any) -> Any:
    """transformers' causal language model with the decoder and the head of a model; None if it has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    text_config, decoder = model.config.get_text_config(), model.get_decoder()
    if type(text_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    with torch.device("meta"):
        causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(text_config)](text_config)
    if type(causal.base_model) is not type(decoder):
        return None
    setattr(causal, causal.base_model_prefix, decoder)
    causal.set_output_embeddings(model.get_output_embeddings())
    causal.decoder_path = next(path for path, part in model.named_modules() if part is decoder)
    return causal.eval().requires_grad_(False)


class _DecoderRows:
    """The output of a decoder that has nothing but the rows behind its last layer."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.last_hidden_state = rows

    def __getitem__(self, _first: int) -> torch.Tensor:
        return self.last_hidden_state

    def __getattr__(self, _name: str) -> None:
        return None


def _logits_behind_decoder(module: Any, decoder: Any) -> torch.Tensor | None:
    """What a model makes of what its decoder and its head return, where the decoder returns the same rows always, and
    the head its input; None if the decoder gets other rows than its embedding's."""
    ids = torch.tensor([[0, 1, 2]])
    embedding: torch.Tensor = decoder.get_input_embeddings()(ids)
    rows = torch.randn(embedding.shape, dtype=torch.float32, generator=torch.Generator().manual_seed(0)) * 30
    head, given = module.get_output_embeddings(), []

    def forward(**arguments: Any) -> _DecoderRows:
        given.append(arguments)
        return _DecoderRows(rows.to(embedding.dtype))

    module.set_output_embeddings(nn.Identity())
    decoder.forward = forward
    try:
        places = torch.arange(ids.shape[1])
        out = module(input_ids=ids, position_ids=places[None], use_cache=False, logits_to_keep=places)
    finally:
        del decoder.forward
        module.set_output_embeddings(head)
    own = [arguments.get("inputs_embeds") for arguments in given]
    logits: torch.Tensor = out.logits
    return logits if len(own) == 1 and (own[0] is None or torch.equal(own[0], embedding)) else None


def read_config(checkpoint: Checkpoint) -> Any:
    """A directory's configuration as transformers has it. Raises ConfigError."""
    from transformers import CONFIG_MAPPING, AutoConfig

    check_file_numbers(checkpoint)
    try:
        config = AutoConfig.from_pretrained(checkpoint.directory, local_files_only=True, trust_remote_code=False)
    # transformers has no list of what it raises for a configuration that it does not expect.
    except Exception as error:
        name = checkpoint.config.get("model_type", "without a model_type")
        if name in list(CONFIG_MAPPING):
            # The error's first line names the field, and the others say what is wrong with it.
            said = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"{checkpoint.directory} has a config.json that can't be read ({said}); copy it again"
            ) from error
        raise ConfigError(
            f"{checkpoint.directory} is of type {name!r}, which this version of transformers can't load "
            f"({first_line(error)}); {what_instead(str(name))}, or upgrade transformers"
        ) from error
    # transformers would otherwise look for the library that made the weights, and run its code.
    for name in ("quantization_config", "compression_config"):
        if hasattr(config, name):
            delattr(config, name)
    return config


def attention_of(config: Any) -> str | dict[str, str]:
    """The attention of the layers that have a KV cache: Baton's. An encoder of images keeps transformers' own."""
    if config.is_encoder_decoder:
        return ENCODER_DECODER_ATTENTION
    if has_other_parts(config):
        text_config, parts = config.get_text_config(), ["", *config.sub_configs]
        return {name: ATTENTION_NAME if getattr(config, name, None) is text_config else "eager" for name in parts}
    if not takes_images(config):
        return ATTENTION_NAME
    # Eager attention would need memory for the square of an image's patches, times heads.
    return {"": "sdpa", "vision_config": "sdpa", "text_config": ATTENTION_NAME}


def model_class_of(checkpoint: Checkpoint, config: Any) -> Any:
    """The class that a model with this configuration is loaded as. Raises ConfigError for one that can't be served."""
    from transformers import GenerationMixin
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    )

    refusal = f"{checkpoint.directory} is of type {config.model_type!r}, which is not supported: "
    instead = f"; {what_instead(config.model_type)}"
    if has_encoder_and_decoder(checkpoint.config):
        mappings = (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING)
        return next(mapping[type(config)] for mapping in mappings if type(config) in mapping)
    if is_encoder(checkpoint.config):
        return encoder_class(checkpoint.directory, config, checkpoint.config)
    if is_decoder_of_both_ways(checkpoint.config):
        raise ConfigError(
            f"{refusal}its tokens attend to those behind, too (use_bidirectional_attention, or is_causal: false, in "
            f"config.json), and decoders are computed causally{instead}"
        )
    is_part = has_other_parts(config)
    known = MODEL_FOR_MULTIMODAL_LM_MAPPING if is_part or takes_images(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    if config.is_encoder_decoder or type(config) not in known:
        raise ConfigError(
            f"{refusal}only decoder-only text models are, some that take images, and some with an encoder{instead}"
        )
    model_class = known[type(config)]
    text_config = config.get_text_config()
    if is_part:
        refusal += f"of its parts only that for text could be served, of type {text_config.model_type!r}, and "
    kinds = set(getattr(text_config, "layer_types", None) or ()) - _KINDS_OF_LAYERS
    if getattr(text_config, "kv_lora_rank", None):
        kinds.discard(_SELECTING)  # of latents; whether the selection is a known one is found out later
    if kinds:
        raise ConfigError(f"{refusal}it has layers of type {', '.join(sorted(kinds))}{instead}")
    # Models with states don't say it, and then what their layers ask for decides.
    if not (getattr(model_class, "_supports_attention_backend", False) or getattr(model_class, "_is_stateful", False)):
        raise ConfigError(f"{refusal}its attention can't be exchanged for the paged one{instead}")
    if is_part and is_classifier(checkpoint.config):
        raise ConfigError(f"{refusal}it has a head for labels{instead}")
    if is_part and getattr(model_class, "generate", None) is not GenerationMixin.generate:
        raise ConfigError(f"{refusal}the model generates in a way of its own{instead}")
    if is_classifier(checkpoint.config) and not takes_images(config):
        return classifier_class(model_class, config, checkpoint.config, checkpoint.directory)
    return with_text_alone(model_class) if is_part else model_class


def first_line(error: BaseException) -> str:
    """What an error of another library says, in short."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
