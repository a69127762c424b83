"""What `--model` may name, and which model directory that is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

import pytest

from baton.config import UpConfig, load
from baton.config.setting import flags_of
from baton.errors import ConfigError
from baton.messages.sampling import SamplingDefaults
from baton.messages.speculation import SpeculationConfig
from baton.models import named_models, resolve
from baton.models.model_cache import sha256_of
from baton.models.resolve import FoundModel, find_model, with_model_directory
from baton.text.model_files import read_model_files, read_sampling_defaults
from baton.text.model_template import ModelTemplate
from router.http.parsed_text import AnswerParsers
from tests.doubles.fake_workers import FakeWorkers
from tests.support.named_models import MODEL, entries, write_directory


def replace_file(path: Path) -> None:
    """Put another file of the same size and time in the place of a file."""
    before, other = path.stat(), path.with_suffix(".other")
    other.write_bytes(path.read_bytes()[::-1])
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)


@dataclass(frozen=True)
class Converted:
    """A GGUF file that was converted once, which takes seconds."""

    environ: Mapping[str, str]
    """Where the cache is that has its directory."""
    found: FoundModel
    said: str
    """What was said on stderr meanwhile."""


@pytest.fixture(scope="module")
def converted(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    environ = {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    with redirect_stderr(StringIO()) as said:
        found = find_model(gguf_file, environ)
    return Converted(environ, found, said.getvalue())


def test_a_gguf_file_and_its_directory_become_one_model_directory(
    gguf_file: Path, converted: Converted, capsys: pytest.CaptureFixture[str]
) -> None:
    assert converted.found.name == "tiny-model.Q8_0"
    assert {path.name for path in converted.found.directory.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert find_model(gguf_file.parent, converted.environ) == converted.found
    assert converted.said.count("Converting") == 1
    assert "Converting" not in capsys.readouterr().err


def test_a_known_file_gets_what_is_known_of_its_model(
    tmp_path: Path, gguf_file: Path, converted: Converted, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = converted.found.directory
    assert read_sampling_defaults(plain) == SamplingDefaults()
    assert ModelTemplate.load(plain, FakeWorkers()).tool_call_parser == ""
    known = replace(MODEL, sha256=sha256_of(gguf_file), sampling={"temperature": 0.2}, tool_call_parser="smollm2")
    monkeypatch.setattr(named_models, "NAMED_MODELS", {"tiny": known})
    directory = find_model(gguf_file, {"XDG_CACHE_HOME": str(tmp_path / "known")}).directory
    assert read_sampling_defaults(directory) == SamplingDefaults(temperature=0.2)
    assert read_model_files(directory).eos_token_ids, "the converter's own content stays"
    template = ModelTemplate.load(directory, FakeWorkers())
    assert template.source == ModelTemplate.load(plain, FakeWorkers()).source
    for setting, parser in (("auto", "smollm2"), ("hermes", "hermes"), ("none", None)):
        assert AnswerParsers.of(setting, "auto", template).tool_call_parser == parser


def test_paths_that_can_not_be_models_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ConfigError, match=r"pipe\.gguf is not a regular file"):
        find_model(tmp_path / "pipe.gguf", {})
    with pytest.raises(ConfigError, match="can't be read: File name too long"):
        find_model(Path("x" * 5000), {})


@pytest.mark.parametrize("change", [lambda path: path.write_bytes(b"GGUF other"), replace_file])
def test_a_file_that_changes_while_it_is_converted_is_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(b"GGUF first")

    def convert(source: Path, directory: Path) -> None:
        write_directory(source, directory)
        change(source)

    monkeypatch.setattr(resolve, "convert_in_child", convert)
    with pytest.raises(ConfigError, match=r"model\.gguf was changed while it was converted; start again"):
        find_model(source, {"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert entries(tmp_path / "cache" / "baton" / "models") == []


def test_of_several_gguf_files_one_must_be_named(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"has 2 GGUF files: name one of them, such as .*a\.gguf"):
        find_model(tmp_path, {})
    (tmp_path / "config.json").touch()
    assert find_model(tmp_path, {}) == FoundModel(tmp_path, tmp_path.name)


def test_a_directory_comes_before_names_and_other_paths_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2", "org/model"):
        (tmp_path / name).mkdir(parents=True)
        assert find_model(Path(name), {}) == FoundModel(Path(name), Path(name).name)
    for name in ("nothing", "/absolute/path", "./org/other/deep", "../org/x"):
        assert find_model(Path(name), {}) == FoundModel(Path(name), Path(name).name)
    # A mistake in a path below a folder that exists must not fetch what a stranger has put under that name.
    for name in ("./org/modle", "org/modle"):
        assert find_model(Path(name), {}) == FoundModel(Path(name), Path(name).name)


def test_settings_get_the_directory_and_a_name_for_clients(
    gguf_file: Path, converted: Converted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", converted.environ["XDG_CACHE_HOME"])
    config = load(UpConfig, {"model": str(gguf_file)}, {}).config
    resolved = with_model_directory(config)
    assert resolved.model == converted.found.directory
    assert resolved.served_model_name == "tiny-model.Q8_0"
    assert flags_of(resolved, UpConfig)["--model"] == str(resolved.model)
    named = load(UpConfig, {"model": str(gguf_file), "model_name": "mine"}, {}).config
    assert with_model_directory(named).served_model_name == "mine"
    simulated = load(UpConfig, {"model": "smollm2", "runner": "simulated"}, {}).config
    assert with_model_directory(simulated) is simulated
    bundled = load(UpConfig, {}, {}).config
    assert with_model_directory(bundled) is bundled


def test_a_draft_model_is_found_as_well(
    tmp_path: Path, gguf_file: Path, converted: Converted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", converted.environ["XDG_CACHE_HOME"])
    monkeypatch.chdir(gguf_file.parent)
    given = {"speculative_config": f'{{"model": "{gguf_file.name}", "num_speculative_tokens": 3}}'}
    resolved = with_model_directory(load(UpConfig, given, {}).config)
    drafting = SpeculationConfig.from_json(resolved.speculative_config)
    assert Path(drafting.model) == converted.found.directory
    assert (drafting.method, drafting.num_speculative_tokens) == ("draft_model", 3)
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path)
    relative = with_model_directory(load(UpConfig, {"speculative_config": '{"model": "small"}'}, {}).config)
    assert SpeculationConfig.from_json(relative.speculative_config).model == str(tmp_path / "small")
    ngram = load(UpConfig, {"speculative_config": '{"method": "ngram"}'}, {}).config
    assert with_model_directory(ngram).speculative_config == '{"method": "ngram"}'


def test_a_named_model_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "NAMED_MODELS", {"tiny": MODEL})
    made = tmp_path / "baton" / "models" / f"{MODEL.sha256}-5"
    made.mkdir(parents=True)
    found = find_model(Path("tiny"), {"XDG_CACHE_HOME": str(tmp_path)})
    assert found == FoundModel(made, "tiny")
    monkeypatch.setattr(resolve, "NAMED_MODELS", {"tiny": replace(MODEL, dequantize=True)})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    nodes = with_model_directory(load(UpConfig, {"model": "tiny"}, {}).config)
    assert (nodes.model, nodes.dequantize) == (made, True)


def test_finding_a_model_directory_imports_nothing_slow() -> None:
    code = (
        "import sys; from pathlib import Path; from baton.models.resolve import find_model; "
        "find_model(Path('/'), {}); "
        "print([name for name in ('torch', 'numpy', 'rich', 'huggingface_hub') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
