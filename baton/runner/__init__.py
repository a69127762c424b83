"""Model runners: weights, paged attention and sampling with torch and transformers, and a simulated runner.

Only this package imports torch and transformers. Importing it is cheap; `load` imports what the specification needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.engine.runner import ModelRunner
from baton.runner.spec import DraftSpec, RunnerSpec, SimulatedSpec, StepTime, TorchSpec

if TYPE_CHECKING:
    from baton.runner.stages.stage_leader import StageLeader

__all__ = ["DraftSpec", "ModelRunner", "RunnerSpec", "SimulatedSpec", "StepTime", "TorchSpec", "load", "load_encoder"]


def load_encoder(spec: TorchSpec) -> ModelRunner:
    """Load what encodes a model's images, speech or texts alone, where that can be divided from it. Raises ConfigError.

    What the specification says of the decoder counts for nothing.
    """
    from baton.runner.encoder_alone import load_encoder_alone

    return load_encoder_alone(spec)


def load(spec: RunnerSpec, stages: StageLeader | None = None) -> ModelRunner:
    """Load a model and allocate its KV cache; raises ConfigError when this machine can't run the specification.

    `stages`: those of a model that several hosts compute, one stage each; the runner ends them.
    """
    if isinstance(spec, SimulatedSpec):
        from baton.runner.simulated import SimulatedRunner

        return SimulatedRunner(spec)
    from baton.runner.model.pooling_files import is_encoder_directory

    if is_encoder_directory(spec.model_dir):
        from baton.runner.text_encoder.encoder_runner import load_encoder

        return load_encoder(spec)
    from baton.model_formats.encoder_decoders import is_encoder_decoder_directory

    if is_encoder_decoder_directory(spec.model_dir):
        from baton.runner.encoder_decoder.loading import load_encoder_decoder

        return load_encoder_decoder(spec)
    from baton.runner.loading import load_runner

    return load_runner(spec, stages=stages)
