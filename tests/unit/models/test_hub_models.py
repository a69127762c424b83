"""Models of the hub, fetched from a small server by a process as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from baton.models.hub import HubName
from tests.support.hub_server import COMMIT, Hub, hub_server

FILES: Mapping[str, bytes] = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights" * 100,
    "pytorch_model.bin": b"a pickle",
    "modeling_own.py": b"code",
    "onnx/model.safetensors": b"another form",
}
WANTED = {"config.json", "tokenizer.json", "model.safetensors"}
UNREACHABLE = "http://127.0.0.1:9"
CODE = """
import os, sys
from pathlib import Path
from baton.models.resolve import find_model
from baton.errors import ConfigError
try:
    found = find_model(Path(sys.argv[1]), os.environ)
    print(found.name, found.directory)
except ConfigError as error:
    print("refused:", error)
"""


AT_ONCE = "import time; time.sleep = lambda _: None"
"""The library's five attempts are a second apart."""


def find(hub_url: str, home: Path, name: str, before: str = "", **variables: str) -> str:
    """What a process prints that runs `before`, then looks for the model, with HF_HOME in `home`."""
    # Variables of whoever runs the tests must not reach the library, which reads them when it is imported.
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    environment = kept | {"HF_HOME": str(home / "hf"), "HF_ENDPOINT": hub_url, "HOME": str(home), **variables}
    done = subprocess.run(
        [sys.executable, "-c", before + CODE, name],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert done.stdout.count("\n") == 1
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stdout.rstrip()


def directory_in(said: str) -> Path:
    name, _, path = said.partition(" ")
    assert name == "tiny"
    return Path(path)


def test_names_of_the_hub_have_one_slash_and_perhaps_a_revision() -> None:
    assert HubName.parse("org/model") == HubName("org/model", None)
    assert HubName.parse("org/model@refs/pr/1") == HubName("org/model", "refs/pr/1")
    assert str(HubName("org/model", "v1")) == "org/model@v1"
    for text in ("model", "a/b/c", "/a", "a/", "../a", "a/..", "a b/c", "a/b@", "a/b@../x", "a/b\n"):
        assert HubName.parse(text) is None


def test_weights_and_texts_are_fetched_once_and_then_found_without_a_network(tmp_path: Path) -> None:
    with hub_server(Hub("org/tiny", FILES)) as hub:
        directory = directory_in(find(hub.url, tmp_path, "org/tiny"))
        assert {path.name for path in directory.iterdir()} == WANTED
        assert all((directory / name).read_bytes() == FILES[name] for name in WANTED)
        hub.requested.clear()
        assert directory_in(find(hub.url, tmp_path, f"org/tiny@{COMMIT}")) == directory
        assert not [path for path in hub.requested if "/resolve/" in path]
        hub.requested.clear()
        assert directory_in(find(hub.url, tmp_path, "org/tiny", HF_HUB_OFFLINE="1")) == directory
        assert hub.requested == []
    assert directory_in(find(hub.url, tmp_path, "org/tiny")) == directory


def test_a_missing_model_and_a_missing_revision_are_told_apart(tmp_path: Path) -> None:
    with hub_server(Hub("org/tiny", FILES)) as hub:
        said = find(hub.url, tmp_path, "org/other")
        assert said.startswith(f"refused: model org/other can't be fetched from {hub.url}: there is no such directory")
        assert find(hub.url, tmp_path, "org/tiny@v9").endswith(": it has no revision v9")


def test_a_gated_and_a_private_model_need_a_token(tmp_path: Path) -> None:
    with hub_server(Hub("org/tiny", FILES, token="secret", is_gated=True)) as hub:
        assert "accept the terms on its page, and set HF_TOKEN" in find(hub.url, tmp_path, "org/tiny")
        assert directory_in(find(hub.url, tmp_path, "org/tiny", HF_TOKEN="secret")).is_dir()
    with hub_server(Hub("org/tiny", FILES, token="secret")) as hub:
        said = find(hub.url, tmp_path / "other", "org/tiny", HF_TOKEN="wrong")
        assert "or it is private: check the name, or set HF_TOKEN" in said


def test_without_a_network_the_error_says_what_to_run(tmp_path: Path) -> None:
    for variables in ({}, {"HF_HUB_OFFLINE": "1"}):
        said = find(UNREACHABLE, tmp_path, "org/tiny@v1", **variables)
        assert "run `hf download org/tiny --revision v1` where there is one" in said


def test_a_download_that_breaks_off_is_an_error_and_the_next_one_completes_it(tmp_path: Path) -> None:
    with hub_server(Hub("org/tiny", FILES, cut="model.safetensors")) as hub:
        said = find(hub.url, tmp_path, "org/tiny", AT_ONCE)
        assert said.startswith("refused: model org/tiny can't be fetched")
        assert said.endswith("what has arrived is kept, so try again")
        hub.cut = ""
        directory = directory_in(find(hub.url, tmp_path, "org/tiny"))
    assert (directory / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_cache_that_can_not_be_written_is_an_error_that_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "hf").touch()
    with hub_server(Hub("org/tiny", FILES)) as hub:
        said = find(hub.url, tmp_path, "org/tiny")
    assert f"its cache can't be written (Not a directory: {tmp_path / 'hf'}" in said
    assert said.endswith("; set HF_HOME to a directory with enough room")


def test_the_library_is_left_as_it_was(tmp_path: Path) -> None:
    code = (
        CODE
        + """
import logging
from huggingface_hub.utils import are_progress_bars_disabled
print(logging.getLogger("huggingface_hub").level != logging.CRITICAL, are_progress_bars_disabled())
"""
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": UNREACHABLE}
    command = [sys.executable, "-c", code, "org/tiny"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.splitlines()[-1] == "True False"
