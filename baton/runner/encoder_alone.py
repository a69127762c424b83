"""Loads what encodes the inputs of a model (images, speech, texts), for a node that does nothing else.

Of a model that takes images the language model stays in its files. An encoder with a decoder is loaded with it: the
check at start, which decides how their products are computed, takes both.
"""

from __future__ import annotations

from dataclasses import replace

from baton.engine.batch import ModelRunnerOutput, SchedulerOutput
from baton.engine.runner import KVLayout, KVMemory, ModelInfo, ModelRunner, OneProcessRunner, RefusedAdapters
from baton.errors import ConfigError
from baton.messages.node_model import Capability
from baton.messages.node_report import ComputePath
from baton.model_formats.encoder_decoders import is_encoder_decoder_directory
from baton.model_formats.images import image_family
from baton.runner.backends.device import resolve_device
from baton.runner.backends.operations import Operations
from baton.runner.compute_paths import products_path
from baton.runner.encoder_decoder.loading import load_encoder_decoder
from baton.runner.execution.encoded_rows import EncodedInputs, EncodedRows
from baton.runner.images import ImageInputs
from baton.runner.model.weights import load_model_for
from baton.runner.shared_by_loaders import model_info, named_errors, prepared_operations
from baton.runner.spec import TorchSpec

_NUM_BLOCKS = 64
"""Blocks of a cache in which nothing but the check at start is kept."""


class EncoderAloneRunner(OneProcessRunner):
    """The encoder of a model whose other parts are not loaded: it makes rows, and executes no step.

    It has the layout of a cache without layers, and no memory behind it.
    """

    def __init__(self, model: ModelInfo, inputs: EncodedInputs) -> None:
        self.model = model
        self.layout = _NO_LAYERS
        self.memory = KVMemory(0, _NUM_BLOCKS, 0, "DRAM", 0, None)
        self.num_host_blocks = 0
        self.adapters = RefusedAdapters(f"{model.name} has its encoder alone here, which takes no adapters")
        self.encoder = EncodedRows(inputs)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Fails every request: their model is not here."""
        why = f"{self.model.name} has its encoder alone here"
        return ModelRunnerOutput({}, failed=dict.fromkeys(scheduler_output.num_scheduled_tokens, why))


_NO_LAYERS = KVLayout.uniform(16, 0, 1, 1, "float32")


def load_encoder_alone(spec: TorchSpec, operations: Operations | None = None) -> ModelRunner:
    """Load the encoder of a model directory; `operations` replaces the machine's kernels (tests).

    What the specification says of the decoder alone (its cache, ranks, drafts) counts for nothing. Raises ConfigError
    for a model that takes texts alone.
    """
    if is_encoder_decoder_directory(spec.model_dir):
        small = replace(spec, num_blocks=_NUM_BLOCKS, cache_bytes=None, step_rows=0, host_cache_bytes=0)
        return load_encoder_decoder(small, operations)
    if image_family(spec.model_dir) is None:
        raise ConfigError(f"{spec.model_dir} takes neither images nor speech: no node with the role encode is needed")
    device = resolve_device(spec.device)
    chosen = prepared_operations(spec, device, operations)
    with named_errors(spec.model_dir):
        loaded = load_model_for(chosen, spec.model_dir, replace(spec.weights, image_part_alone=True), device)
        inputs = ImageInputs.of(loaded, chosen)
    info = model_info(spec, loaded, chosen, _NO_LAYERS, loaded.max_model_len, None)
    row_numerics = inputs.row_numerics(loaded, chosen)
    num_bytes = loaded.weights.num_bytes
    info = replace(
        info,
        numerics=row_numerics,
        row_numerics=row_numerics,
        row_width=loaded.config.hidden_size,
        capabilities=frozenset((Capability.IMAGE,)),
        compute_paths=(
            ComputePath("weights", f"{loaded.dtype}, {num_bytes >> 20} MiB"),
            products_path(chosen),
            ComputePath("other parts", f"left out, images are encoded: {', '.join(loaded.left_out)}"),
        ),
    )
    return EncoderAloneRunner(info, inputs)
