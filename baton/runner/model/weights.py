"""Loads a checked model directory as a transformers module."""

from __future__ import annotations

import copy
import hashlib
import logging
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.overrides import TorchFunctionMode

from baton.errors import ConfigError
from baton.model_formats.limits import CONTEXT_WITHOUT_POSITIONS, longest_context
from baton.model_formats.model_types import what_instead
from baton.runner.backends.device import CPU
from baton.runner.backends.operations import Operations
from baton.runner.model.checkpoint import Checkpoint, check_numbers, open_checkpoint
from baton.runner.model.mixtures.experts import EXPERTS_NAME
from baton.runner.model.model_classes import (
    ImagePart,
    attention_of,
    derived_class,
    divide_image_model,
    first_line,
    has_other_parts,
    is_unused,
    model_class_of,
    read_config,
    takes_images,
    text_part_of,
    with_head_renamed,
    with_image_part_alone,
    without_left_out,
)
from baton.runner.model.stored.formats import format_of
from baton.runner.model.stored.held import dequantized_on_file, weights_on_file, weights_to_quantize
from baton.runner.model.stored.mapped_files import DuplicateTensor, TensorOnFile, tensors_on_file
from baton.runner.model.stored.plan import CheckpointNames, WeightPlan, check_shapes, check_size, plan_weights
from baton.runner.model.stored.quantize import GROUP
from baton.runner.model.stored.weight import StoredWeight, UnusableWeight, WeightFormat, stored_weights
from baton.runner.spec import WeightSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

READING = 2
"""To be raised when quantised files, or weights that are quantised here, come to mean other numbers than before.

It is part of such models' fingerprints: nodes that would read the same files differently refuse each other.
"""

_ONE_AT_A_TIME = threading.Lock()
"""transformers replaces functions of its classes while it makes a module (the one that ties weights, say), and puts
back what it found. Of two threads one would find the other's replacement, and leave it there for good."""

_log = logging.getLogger(__name__)

_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """What the weights of a loaded model are."""

    treatment: str = ""
    """What was done to the checkpoint's weights: int8, int4, dequantized; empty: nothing."""
    description: str = ""
    """For operators: "int4, groups of 32, 4.5 bits a weight"; empty: all weights are plain."""
    num_bytes: int = 0
    """Their size in memory, plain ones included."""
    table_bytes: int = 0
    """How many of these bytes are of tables of which a step reads a few rows: embeddings, except one that the head
    shares."""
    is_quantized: bool = False
    """Whether some are computed as quantised ones."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model as transformers built it, in evaluation mode, before its products are replaced."""

    module: nn.Module
    """Its plain weights are in host memory: `Transformer` moves those of its layers to `device`. Of a model that takes
    images the text part."""
    config: Any
    """The text model's transformers configuration."""
    checkpoint: Checkpoint
    dtype: str
    """float32 or bfloat16."""
    architecture: str
    device: torch.device = CPU
    weights: ModelWeights = ModelWeights()
    image_part: nn.Module | None = None
    """What encodes images, if the model takes them; on the host, too."""
    left_out: tuple[str, ...] = ()
    """The paths of the parts that are not served, of a model of which the text part alone is."""

    @property
    def max_model_len(self) -> int:
        """The most tokens of a sequence. Raises ConfigError for a number beyond all bounds."""
        positions = getattr(self.config, "max_position_embeddings", CONTEXT_WITHOUT_POSITIONS)
        return longest_context(self.checkpoint.directory, self.checkpoint.config, positions)

    @property
    def fingerprint(self) -> str:
        """The model's fingerprint: that of its files, and of how quantised weights are read or made."""
        if not (self.weights.treatment or self.weights.description):
            return self.checkpoint.fingerprint
        made_of = f"{self.checkpoint.fingerprint} {self.weights.treatment} {READING}"
        return hashlib.sha256(made_of.encode()).hexdigest()


def resolve_dtype(name: str, device: torch.device = CPU) -> str:
    """The dtype by name; `auto` is bfloat16 where the device multiplies it natively, otherwise float32.

    Raises ConfigError for unknown names.
    """
    if name == "auto" and device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    if name == "auto":
        return "bfloat16" if _cpu_flags() & _BFLOAT16_FLAGS else "float32"
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown; use auto, float32 or bfloat16")
    return name


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return frozenset(flags.partition(":")[2].split())


def load_model_for(operations: Operations, directory: Path, how: WeightSpec, device: torch.device) -> LoadedModel:
    """Load a model directory as `load_model` does, with quantised weights made plain if operations don't pack them.

    Raises ConfigError also for a quantization that these operations can't compute.
    """
    if how.quantization is not None and not operations.packs_quantized:
        raise ConfigError(
            f"{how.quantization} weights can't be computed by {operations.numerics()}; leave quantization out"
        )
    return load_model(
        directory,
        replace(
            how,
            dequantize=how.dequantize or not operations.packs_quantized,
            # What a GPU has while it loads in parts was not measured yet.
            in_parts=how.in_parts and device.type == "cpu",
        ),
        device,
    )


def load_model(directory: Path, how: WeightSpec, device: torch.device = CPU) -> LoadedModel:
    """Load a model directory.

    Raises ConfigError (one line: what, and how to fix it) for a directory that is missing, incomplete, corrupt, pickled
    or of an architecture or a format that can't run here. Never reaches for the network and runs no code from the
    directory.
    """
    dtype = resolve_dtype(how.dtype, device)
    how = replace(how, dtype=dtype)
    checkpoint = open_checkpoint(directory)
    try:
        weight_format = format_of(checkpoint.config)
    except UnusableWeight as error:
        raise ConfigError(f"{directory} can't be served: {error}") from error
    if how.quantization is not None and weight_format is not None:
        raise ConfigError(f"{directory} is quantised already ({weight_format.description}); leave quantization out")
    # Imported only now, since transformers is slow to import and a bad directory is refused without it.
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = read_config(checkpoint)
    model_class = model_class_of(checkpoint, config)
    check_numbers(checkpoint, config.get_text_config())
    if how.image_part_alone:
        if not takes_images(config):
            raise ConfigError(f"{directory} is no model that takes images")
        model_class = with_image_part_alone(model_class)
    try:
        with _ONE_AT_A_TIME, tensors_on_file(checkpoint.weight_files) as on_file:
            skeleton = _skeleton(model_class, config, DTYPES[dtype])
            tensors = without_left_out(skeleton, with_head_renamed(skeleton, on_file))
            num_layers = config.get_text_config().num_hidden_layers
            if not 0 < num_layers <= len(on_file):
                raise UnusableWeight(f"{num_layers} layers can't be made of {len(on_file)} tensors")
            plan = _plan(skeleton, tensors, weight_format, how, device)
            _check_types(plan)
            _warn_of_lost_bits(plan, directory, dtype)
            module, info = _class_with(plan, model_class, DTYPES[dtype], device).from_pretrained(
                None,
                config=config,
                state_dict=plan.loaded,
                dtype=DTYPES[dtype],
                attn_implementation=attention_of(config),
                experts_implementation=EXPERTS_NAME,
                local_files_only=True,
                output_loading_info=True,
            )
    except ConfigError:
        raise
    except SafetensorError as error:
        raise ConfigError(f"the weights in {directory} can't be read ({first_line(error)}); copy them again") from error
    except ImportError as error:
        instead = what_instead(checkpoint.model_type)
        raise ConfigError(
            f"{directory} needs a library that Baton does not use ({first_line(error)}); {instead}"
        ) from error
    except (UnusableWeight, DuplicateTensor) as error:
        raise ConfigError(f"the weights in {directory} can't be used: {error}") from error
    except Exception as error:
        raise ConfigError(f"the weights in {directory} don't fit its config.json ({first_line(error)})") from error
    missing = sorted(name for name in info["missing_keys"] if not is_unused(name, model_class))
    if missing:
        raise ConfigError(
            f"the weights in {directory} lack {len(missing)} tensors that its config.json asks for, first {missing[0]}"
        )
    module.eval().requires_grad_(False)
    weights = _weights(plan, module, weight_format, how)
    loaded = LoadedModel(module, config.get_text_config(), checkpoint, dtype, model_class.__name__, device, weights)
    if has_other_parts(config):
        with _ONE_AT_A_TIME:
            return replace(loaded, module=text_part_of(module), left_out=module.left_out)
    if not takes_images(config):
        return loaded
    if how.image_part_alone:
        return replace(loaded, image_part=ImagePart(module), left_out=module.left_out)
    text_part, image_part = divide_image_model(module)
    return replace(loaded, module=text_part, image_part=image_part)


def parameter_shapes(checkpoint: Checkpoint) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Names and shapes of a model's parameters while they are plain, from config.json alone: each once, and the further
    names of those that several parts share.

    Raises ConfigError.
    """
    config = read_config(checkpoint)
    model_class = model_class_of(checkpoint, config)
    check_numbers(checkpoint, config.get_text_config())
    with _ONE_AT_A_TIME:
        skeleton = _skeleton(model_class, config, torch.float32)
    every = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters(remove_duplicate=False)}
    once = {name: every[name] for name, _ in skeleton.named_parameters()}
    return once, {name: shape for name, shape in every.items() if name not in once}


def _skeleton(model_class: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """The model without memory for its weights, which have this dtype where its class names no other."""
    with torch.device("meta"), _DefaultDtype(dtype):
        skeleton: nn.Module = model_class(copy.deepcopy(config))
    return skeleton


class _DefaultDtype(TorchFunctionMode):
    """While active, this thread makes tensors in this dtype if none is named. torch's own default is that of all
    threads, of which another may compute."""

    _MAKE_TENSORS = frozenset({torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn})

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in self._MAKE_TENSORS and named.get("dtype") is None:
            named["dtype"] = self._dtype
        return func(*args, **named)


def _plan(
    skeleton: nn.Module,
    tensors: Mapping[str, TensorOnFile],
    weight_format: WeightFormat | None,
    how: WeightSpec,
    device: torch.device,
) -> WeightPlan:
    """Decide where the weights of a checkpoint belong; raises UnusableWeight."""
    names, dtype = CheckpointNames(skeleton), DTYPES[how.dtype]
    weights: dict[str, StoredWeight] = {}
    experts: dict[str, list[list[StoredWeight]]] = {}
    plain: Mapping[str, TensorOnFile] = tensors
    if weight_format is not None:
        weights, used = stored_weights(weight_format, tensors, how.dequantize)
        plain = _without(tensors, used)
        if how.dequantize:
            weights = {name: replace(stored, packed_bytes=None) for name, stored in weights.items()}
    sizes = [*(stored.shape for stored in weights.values()), *(tensor.shape for tensor in plain.values())]
    check_size(skeleton, sizes)
    check_shapes(names, plain)
    # The text part alone is quantised, if the model takes images.
    if how.quantization is not None and not how.image_part_alone:
        chosen = weights_to_quantize(skeleton, names, _of_text(skeleton, names, plain), how.quantization)
        weights, experts, plain = chosen.weights, chosen.experts, _without(plain, chosen.tensors)
    dtypes = {tensor.dtype for tensor in plain.values()}
    if how.in_parts:
        left = weights_on_file(skeleton, names, plain, dtype, device)
        weights = {
            name: dequantized_on_file(stored, dtype, device) if stored.packed_bytes is None else stored
            for name, stored in weights.items()
        }
        weights, experts, plain = weights | left.weights, experts | left.experts, _without(plain, left.tensors)
    plan = plan_weights(skeleton, names, weights, experts, plain)
    plan.plain_dtypes.update(dtypes)
    return plan


def _of_text(skeleton: Any, names: CheckpointNames, plain: Mapping[str, TensorOnFile]) -> Mapping[str, TensorOnFile]:
    """The tensors of a model's text part, for a model that takes images; otherwise all."""
    if not takes_images(skeleton.config):
        return plain
    parts = (skeleton.get_decoder(), skeleton.get_output_embeddings())
    prefixes = tuple(
        f"{path}." for path, part in skeleton.named_modules() if any(part is text_part for text_part in parts)
    )
    return {name: tensor for name, tensor in plain.items() if names.parameter_of(name)[0].startswith(prefixes)}


def _without(tensors: Mapping[str, TensorOnFile], names: Collection[str]) -> dict[str, TensorOnFile]:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def _check_types(plan: WeightPlan) -> None:
    for name, tensor in plan.loaded.items():
        if isinstance(tensor, TensorOnFile) and tensor.dtype.startswith("F8"):
            raise UnusableWeight(f"{name} is of type {tensor.dtype} and has no scale; copy all files again")


def _warn_of_lost_bits(plan: WeightPlan, directory: Path, dtype: str) -> None:
    """Log that plain weights in float16 are rounded to bfloat16, if they are."""
    if dtype == "bfloat16" and "F16" in plan.plain_dtypes:
        _log.warning(
            "%s holds float16, with 11 significant bits; it is computed in bfloat16, with 8: --dtype float32 keeps all",
            directory,
        )


def _class_with(plan: WeightPlan, model_class: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The class of the model, whose instances have the parts that hold weights from the start.

    Otherwise transformers would allocate plain weights for them.
    """
    if not plan.held:
        return model_class

    def build(self: Any, config: Any, *arguments: Any, **named: Any) -> None:
        model_class.__init__(self, config, *arguments, **named)
        plan.install(self, dtype, device)

    return derived_class(model_class, build)


def _weights(plan: WeightPlan, module: nn.Module, weight_format: WeightFormat | None, how: WeightSpec) -> ModelWeights:
    plain_bytes = sum(parameter.nbytes for parameter in module.parameters())
    plain_bytes += sum(stored.packed_bytes or 0 for stored in plan.held if stored.is_plain)
    treatment = how.quantization or ("dequantized" if how.dequantize and weight_format is not None else "")
    held = [stored for stored in plan.held if not stored.is_plain]
    table_bytes = _table_bytes(plan, module)
    if not held:
        description = "" if weight_format is None else f"{weight_format.description}, dequantised to {how.dtype}"
        return ModelWeights(treatment, description, plain_bytes, table_bytes)
    packed_bytes = sum(stored.packed_bytes or 0 for stored in held)
    name = f"{how.quantization}, groups of {GROUP}" if weight_format is None else weight_format.description
    bits = 8 * packed_bytes / sum(stored.shape[0] * stored.shape[1] for stored in held)
    description = f"{name}, {bits:.3g} bits a weight"
    return ModelWeights(treatment, description, plain_bytes + packed_bytes, table_bytes, is_quantized=True)


def _table_bytes(plan: WeightPlan, module: nn.Module) -> int:
    """The size in memory of the embeddings whose weight no other part has."""
    parts = [(part, weight) for part in module.modules() for weight in part.parameters(recurse=False)]
    shared = {id(weight) for part, weight in parts if not isinstance(part, nn.Embedding)}
    plain = {id(weight): weight.nbytes for part, weight in parts if isinstance(part, nn.Embedding)}
    multiplied = {id(stored) for stored in plan.linears.values()}
    held = {id(stored): stored.packed_bytes or 0 for stored in plan.embeddings.values()}
    return sum(size for one, size in (plain | held).items() if one not in shared | multiplied)
