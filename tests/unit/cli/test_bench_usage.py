"""What benchmarks, the simulator and the doctor say to a wrong command line, before they measure anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.cli import main as command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.csv").touch()
    (tmp_path / "empty.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("bench engine --kv-cache-dtype int3", "Invalid value for '--kv-cache-dtype': 'int3' is not one of 'auto', "),
        ("bench handoff --dtype float64", "Invalid value for '--dtype': 'float64' is not one of 'auto', 'float32'"),
        ("bench nodes --start 1p1d --dtype float64", "Invalid value for '--dtype'"),
        ("bench nodes --start one", "--start: 'one' is neither colocated:N, xPyD nor conditional:xPyD"),
        ("bench nodes --start 1p1d --nodes 5", "--start: '1p1d' has 2 nodes, not 5"),
        ("bench router --streams 0", "Invalid value for '--streams': 0 is not in the range 1<=x<=100000"),
        ("bench router --streams 99999999", "Invalid value for '--streams'"),
        ("bench router --round-s nan", "Invalid value for '--round-s': 'nan' is not a number"),
        ("bench overload --factor nan", "Invalid value for '--factor': 'nan' is not a number"),
        ("bench overload --out empty.json", "empty.json/overload.json can't be written: "),
        ("bench compare --report folder", "folder is a folder: name a file in it"),
        ("bench validate --result-filename folder", "folder is a folder: name a file in it"),
        (
            "bench compare --kv-cache-memory much",
            "Invalid value for '--kv-cache-memory': 'much' is not a number of bytes",
        ),
        ("bench validate --kv-cache-memory 0", "Invalid value for '--kv-cache-memory': '0' is not a number of bytes"),
        ("bench validate --load 0", "--load: 0 is not above 0"),
        (
            "bench validate --arrangement conditional:1p1d --decode-tp 2",
            "--arrangement: conditional:1p1d needs nodes of one shape",
        ),
        ("bench validate --tp 0", "Invalid value for '--tp'"),
        (
            "bench validate --arrangement conditional:1p1d --pp 2 --prefill-pp 1",
            "--arrangement: conditional:1p1d needs",
        ),
        ("bench nodes --start 1p1d --result-filename empty.json/x", "empty.json/x can't be written: "),
        ("bench serve --port 1 --result-filename empty.json/x", "empty.json/x can't be written: "),
        ("bench serve --port 1 --report folder", "folder is a folder: name a file in it"),
        ("bench serve --port 1 --dataset-path empty.csv", "--dataset-path: the dataset random reads no file: choose "),
        ("bench serve --backend openai --base-url ftp://host", "--base-url begins with ftp://; use http:// or https"),
        ("bench report missing.json", "missing.json: No such file or directory"),
        ("bench report folder", "folder: Is a directory"),
        ("simulate --result-filename folder", "folder is a folder: name a file in it"),
        ("simulate --dataset-name azure --dataset-path empty.csv", "--dataset-path: empty.csv contains no request"),
        ("simulate --preset distserve --dataset-path empty.csv", "--dataset-path: the dataset "),
        ("simulate --step-times empty.json", "empty.json: not a table of step times: it has no field 'prefill'"),
        ("simulate --arrangement 99999999p1d", "--arrangement: 99999999p1d has more than 10,000 nodes"),
        ("simulate --splits 99999999", "Invalid value for '--splits'"),
        ("simulate --mtbf-s nan", "Invalid value for '--mtbf-s': 'nan' is not a number: see `baton simulate -h`"),
        ("doctor --dtype float64", "Invalid value for '--dtype'"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_wrong_command_line_is_refused_in_one_line(words: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(words.split()) == 2
    printed = capfd.readouterr()
    assert printed.err.startswith(f"baton: {said}")
    assert (printed.out, printed.err.count("\n")) == ("", 1)


@pytest.mark.parametrize("name", ["engine", "handoff", "router", "compare"])
@pytest.mark.usefixtures("folder")
def test_a_model_that_there_is_not_is_refused_before_anything_starts(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["bench", name, "--model", "folder"]) == 78
    reason = "model folder is no directory with a config.json; give --model another one"
    assert capfd.readouterr() == ("", f"baton: {reason}\n")


def test_a_simulation_that_serves_no_request_has_failed(capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["simulate", "--num-prompts", "3", "--cache-tokens", "16"]) == 1
    *_, reason, last = capfd.readouterr().err.splitlines()
    assert reason.startswith("1p1d: 3 failed: prompt: with max_tokens comes to 1152 tokens, more than any node's")
    assert last == "baton: no request was served; the errors are listed above"


def test_the_files_of_a_result_may_be_new_or_there_already(folder: Path) -> None:
    words = ["simulate", "--num-prompts", "3", "--result-filename", "new/result.json", "--report", "empty.csv"]
    for _ in range(2):
        assert command.main(words) == 0
    assert (folder / "new" / "result.json").stat().st_size
    assert (folder / "empty.csv").read_text().startswith("<!doctype html>")
