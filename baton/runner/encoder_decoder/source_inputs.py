"""The encoder of a model with a decoder: from speech, or a text's tokens, to the rows that the decoder attends to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton.errors import ConfigError, InvalidRequest
from baton.messages.encoder_contents import EncoderContent
from baton.messages.request_limits import AUDIO_RATE
from baton.model_formats.encoder_decoders import EncoderDecoder, aligned
from baton.runner.encoder_decoder.attention import attend_in_encoder
from baton.runner.images.image_encoder import one_thread
from baton.runner.model.transformer import on_device, on_host
from baton.runner.model.weights import LoadedModel


class SourceInputs:
    """Encodes one input at a time, so that its rows depend on nothing else. Called from one thread at a time."""

    def __init__(self, model: LoadedModel, shape: EncoderDecoder) -> None:
        """`model`: with its products replaced. Raises ConfigError if no features of speech can be made."""
        self._shape = shape
        module: Any = model.module
        self._encoder = module.get_encoder()
        self._device = model.device
        self._vocab_size: int = model.config.vocab_size
        attend_in_encoder(self._encoder)
        self._features = _feature_extractor(model.checkpoint.directory) if shape.source == "speech" else None

    @property
    def numerics(self) -> str:
        """A name for what decides the rows of an input, beside the model's files and its products."""
        return f"torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"

    def rows(self, content: EncoderContent, num_rows: int) -> npt.NDArray[np.float32]:
        """The rows of an input, float32 [num_rows, width], zeros behind its own. Raises InvalidRequest for a wrong one.

        `content.data`: speech as GenerateRequest.audio has it, or token ids as little-endian 32-bit numbers.
        """
        field = "prompt" if self._features is None else "audio"
        with on_device(self._device), torch.inference_mode(), one_thread():
            given = self._tokens(content.data) if self._features is None else self._speech(content.data)
            made = on_host(self._encoder(**{name: tensor.to(self._device) for name, tensor in given.items()})[0][0])
        if not np.isfinite(made).all():
            raise InvalidRequest(field, "makes the encoder give numbers that are not finite")
        if aligned(len(made)) != num_rows:
            raise InvalidRequest(field, f"has {len(made)} rows, which do not end before position {num_rows}")
        rows = np.zeros((num_rows, made.shape[1]), dtype=np.float32)
        rows[: len(made)] = made
        return rows

    def _tokens(self, data: bytes) -> dict[str, torch.Tensor]:
        if not data or len(data) % 4 or len(data) // 4 > self._shape.most_rows:
            raise InvalidRequest("prompt", f"is not 1 to {self._shape.most_rows} tokens for the encoder")
        token_ids = np.frombuffer(data, "<u4").astype(np.int64)
        if token_ids.max() >= self._vocab_size:
            raise InvalidRequest("prompt", f"has a token id outside of [0, {self._vocab_size})")
        return {"input_ids": torch.from_numpy(token_ids)[None]}

    def _speech(self, data: bytes) -> dict[str, torch.Tensor]:
        assert self._features is not None
        if not data or len(data) % 2:
            raise InvalidRequest("audio", f"has {len(data)} bytes, which are no samples of 16 bits")
        samples = np.frombuffer(data, "<i2").astype(np.float32) / 32768
        made = self._features(samples, sampling_rate=AUDIO_RATE, return_tensors="np")["input_features"]
        return {"input_features": torch.from_numpy(made).to(next(self._encoder.parameters()).dtype)}


def _feature_extractor(directory: Path) -> Any:
    from transformers import WhisperFeatureExtractor

    try:
        return WhisperFeatureExtractor.from_pretrained(directory, local_files_only=True)
    # transformers has no list of what it raises for a configuration that it does not expect.
    except Exception as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"the features of speech in {directory} can't be made ({said:.200}); copy it again"
        ) from error
