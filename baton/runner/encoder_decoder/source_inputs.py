"""The encoder of a model with a decoder: from speech, or a text's tokens, to the rows that the decoder attends to."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton.errors import ConfigError, InvalidRequest
from baton.messages.spans import EncoderContent
from baton.model_formats.encoder_decoders import EncoderDecoder, aligned
from baton.model_formats.limits import AUDIO_RATE, LONGEST_SPEECH_S
from baton.runner.encoder_decoder.attention import attend_in_encoder
from baton.runner.model.cached_model import on_device, on_host
from baton.runner.model.model_classes import first_line
from baton.runner.model.weights import LoadedModel
from baton.runner.torch_threads import torch_threads

_FEATURES = {"feature_size": 80, "sampling_rate": AUDIO_RATE, "hop_length": 160, "chunk_length": 30, "n_fft": 400}
"""The numbers of a preprocessor_config.json that decide the features of speech, as they are where it says nothing."""


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
        self._features = _feature_extractor(model, shape) if shape.source == "speech" else None

    @property
    def numerics(self) -> str:
        """A name for what decides the rows of an input, beside the model's files and its products."""
        return f"transformers-{version('transformers')}"

    def rows(self, content: EncoderContent, num_rows: int) -> npt.NDArray[np.float32]:
        """The rows of an input, float32 [num_rows, width], zeros behind its own. Raises InvalidRequest for a wrong one.

        `content.data`: speech as GenerateRequest.audio has it, or token ids as little-endian 32-bit numbers.
        """
        field = content.kind.field
        with on_device(self._device), torch.inference_mode(), torch_threads(1):
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
        most = self._features.n_samples
        if len(data) // 2 > most:
            raise InvalidRequest(
                "audio", f"has {len(data) // 2 / AUDIO_RATE:.2f} s, and the model takes {most // AUDIO_RATE} s at once"
            )
        samples = np.frombuffer(data, "<i2").astype(np.float32) / 32768
        made = self._features(samples, sampling_rate=AUDIO_RATE, return_tensors="np")["input_features"]
        return {"input_features": torch.from_numpy(made).to(next(self._encoder.parameters()).dtype)}


def _feature_extractor(model: LoadedModel, shape: EncoderDecoder) -> Any:
    """What makes the features of speech, from the numbers of preprocessor_config.json alone: others, such as `dither`,
    would add noise.
    """
    from transformers import WhisperFeatureExtractor

    directory = model.checkpoint.directory
    try:
        given = WhisperFeatureExtractor.get_feature_extractor_dict(directory, local_files_only=True)[0]
        numbers = {name: given.get(name, usual) for name, usual in _FEATURES.items()}
        if wrong := _wrong_feature(numbers, model.config.num_mel_bins, 2 * shape.most_rows):
            raise ValueError(f"{wrong} is {numbers[wrong]!r:.40} in its preprocessor_config.json")
        return WhisperFeatureExtractor(**numbers)
    # transformers has no list of what it raises for a configuration that it does not expect.
    except Exception as error:
        said = first_line(error)
        raise ConfigError(f"the features of speech in {directory} can't be made ({said}); copy it again") from error


def _wrong_feature(numbers: Mapping[str, Any], num_bins: int, num_frames: int) -> str:
    """Name of the number with which an encoder that takes features [num_bins, num_frames] can't work; empty: none."""
    most = {"chunk_length": LONGEST_SPEECH_S, "hop_length": AUDIO_RATE, "n_fft": AUDIO_RATE}
    must_be = {"feature_size": num_bins, "sampling_rate": AUDIO_RATE}
    for name, number in numbers.items():
        if type(number) is not int or not 1 <= number <= most.get(name, number) or number != must_be.get(name, number):
            return name
    frames = numbers["chunk_length"] * AUDIO_RATE // numbers["hop_length"]
    return "" if frames == num_frames else "chunk_length"
