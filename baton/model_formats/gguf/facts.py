"""Typed access to what a GGUF file says about its model."""

from __future__ import annotations

import array
import struct
from collections.abc import Sequence

from baton.errors import ConfigError
from baton.model_formats.gguf.container import GgufFile

_LARGEST = 2**31
_MAX_FACTORS = 4096


class Facts:
    """The metadata of a file. A key that begins with a dot is one of the architecture: `.block_count`.

    The methods raise ConfigError for a value that is missing without a default, or is not what it must be.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = ""
        self.architecture = self.text("general.architecture")

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 to 2 ** 31."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _LARGEST:
            raise self._wrong(key, "a positive whole number")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number. Of a float32 it is the shortest decimal that means the same, such as 1e-05."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
            raise self._wrong(key, "a finite number")
        short = float(f"{value:.7g}")
        return short if _float32(short) == _float32(value) else float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0, as `real` gives it."""
        value = self.real(key, default)
        if value <= 0:
            raise self._wrong(key, "a number above 0")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A text."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def switch(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def texts(self, key: str) -> Sequence[str]:
        """A list of texts."""
        value = self._value(key, None)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self._wrong(key, "a list of texts")
        return value

    def numbers(self, key: str, count: int) -> Sequence[float]:
        """A list of `count` numbers."""
        value = self._value(key, None)
        if not isinstance(value, array.array) or len(value) != count:
            raise self._wrong(key, f"a list of {count} numbers")
        return value

    def has(self, key: str) -> bool:
        """Whether the file has the key."""
        return self._full(key) in self.file.metadata

    def keys(self, start: str) -> Sequence[str]:
        """The architecture's keys that begin with `start`, such as `.rope.`, in the file's order."""
        full = self._full(start)
        return [key.removeprefix(self.architecture) for key in self.file.metadata if key.startswith(full)]

    def shown(self, key: str) -> str:
        """A key and its value as a message shows them, cut."""
        value = self.file.metadata.get(self._full(key))
        short = repr(value)[:40] if isinstance(value, int | float | str) else "a list"
        return f"{self._full(key)[:80]} = {short}"

    def token(self, key: str) -> int | None:
        """The id of a special token; None if the file names none, or one that does not exist."""
        value = self.file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        is_id = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < self.vocab_size
        return value if is_id else None  # type: ignore[return-value]

    @property
    def vocab_size(self) -> int:
        """The number of rows of the embedding."""
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ConfigError(f"{self.file.path} has no matrix token_embd.weight; is it a language model?")
        return embedding.shape[0]

    def factors(self, name: str) -> list[float] | None:
        """The numbers of a short tensor of float32, such as rope_freqs.weight; None if there is no such tensor."""
        tensor = self.file.tensors.get(name)
        if tensor is None:
            return None
        if tensor.format.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MAX_FACTORS:
            raise ConfigError(f"{self.file.path}: tensor {name} is not a short list of float32 numbers")
        values = list(struct.unpack(f"<{tensor.shape[0]}f", self.file.bytes_of(tensor)))
        if not all(0 < value < float("inf") for value in values):
            raise ConfigError(f"{self.file.path}: tensor {name} has a number that is not positive and finite")
        return values

    def _value(self, key: str, default: object) -> object:
        value = self.file.metadata.get(self._full(key), default)
        if value is None:
            raise ConfigError(f"{self.file.path} lacks {self._full(key)}")
        return value

    def _full(self, key: str) -> str:
        return self.architecture + key if key.startswith(".") else key

    def _wrong(self, key: str, expected: str) -> ConfigError:
        return ConfigError(f"{self.file.path}: {self._full(key)} is not {expected}")


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<d", value)
