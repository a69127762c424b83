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
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,30,4\n")
    return tmp_path


REFUSED = """
bench engine --kv-cache-dtype int3 | Invalid value for '--kv-cache-dtype': 'int3' is not one of 'auto'
bench engine --speculative {"method":"oracle"} | Invalid value for '--speculative': method must be one of ngram
bench handoff --dtype float64 | Invalid value for '--dtype': 'float64' is not one of 'auto', 'float32'
bench nodes --start 1p1d --dtype float64 | Invalid value for '--dtype'
bench nodes --start one | --start: 'one' is neither colocated:N, xPyD nor conditional:xPyD
bench nodes --start 1p1d --nodes 5 | --start: '1p1d' has 2 nodes, not 5
bench nodes --start 1p1d --result-filename empty.json/x | empty.json/x can't be written:
bench router --streams 0 | Invalid value for '--streams': 0 is not in the range 1<=x<=100000
bench router --streams 99999999 | Invalid value for '--streams'
bench router --round-s nan | Invalid value for '--round-s': 'nan' is not a number
bench overload --factor nan | Invalid value for '--factor': 'nan' is not a number
bench overload --out empty.json | empty.json/overload.json can't be written:
bench compare --report folder | folder is a folder: name a file in it
bench compare --kv-cache-memory much | Invalid value for '--kv-cache-memory': 'much' is not a number of bytes
bench validate --result-filename folder | folder is a folder: name a file in it
bench validate --kv-cache-memory 0 | Invalid value for '--kv-cache-memory': '0' is not a number of bytes
bench validate --load 0 | --load: 0 is not above 0
bench validate --arrangement conditional:1p1d --decode-tp 2 | --arrangement: conditional:1p1d needs nodes of one shape
bench validate --tp 0 | Invalid value for '--tp'
bench validate --arrangement conditional:1p1d --pp 2 --prefill-pp 1 | --arrangement: conditional:1p1d needs
bench validate --speculative-config {"method":"oracle"} | Invalid value for '--speculative-config': method must
bench serve --port 1 --result-filename empty.json/x | empty.json/x can't be written:
bench serve --port 1 --report folder | folder is a folder: name a file in it
bench serve --port 1 --dataset-path empty.csv | --dataset-path: the dataset random reads no file: choose
bench serve --backend openai --base-url ftp://host | --base-url begins with ftp://; use http:// or https
bench serve --base-url http://127.0.0.1:1/v1 | --base-url needs an OpenAI endpoint: add --backend openai
bench serve --backend openai --base-url http://127.0.0.1:1/api | --base-url has the path '/api'; give the path
bench serve --backend openai --base-url http://127.0.0.1:x | --base-url: Port could not be cast to integer value as 'x'
bench serve --seed -1 | Invalid value for '--seed': -1 is not in the range x>=0
bench serve ttft:500 | unexpected argument 'ttft:500'; limits of an SLO follow --goodput
bench serve --goodput ttft:5 tbt:3 | --goodput: 'tbt:3' is not one of ttft:MS, tpot:MS, e2el:MS
bench report missing.json | missing.json: No such file or directory
bench report folder | folder: Is a directory
bench report empty.json | empty.json: not a result of `baton bench` (baton.bench/1)
simulate --result-filename folder | folder is a folder: name a file in it
simulate --dataset-name azure --dataset-path empty.csv | --dataset-path: empty.csv contains no request
simulate --preset distserve --dataset-path empty.csv | --dataset-path: the dataset
simulate --step-times empty.json | empty.json: not a table of step times: it has no field 'prefill'
simulate --arrangement 99999999p1d | --arrangement: 99999999p1d has more than 10,000 nodes
simulate --splits 99999999 | Invalid value for '--splits'
simulate --mtbf-s nan | Invalid value for '--mtbf-s': 'nan' is not a number: see `baton simulate -h`
simulate --tp 0 | Invalid value for '--tp': 0 is not in the range 1<=x<=64
simulate --decode-pp 65 | Invalid value for '--decode-pp': 65 is not in the range 1<=x<=64
simulate --exchange-ms nan | Invalid value for '--exchange-ms': 'nan' is not a number
simulate --stage-ms -1 | Invalid value for '--stage-ms': -1.0 is not in the range x>=0
simulate --rank-memory-gb 20 | --rank-memory-gb: 1 x 20 GB (tp1) do not hold 26 GB of weights and a KV block
simulate --rank-memory-gb 80 --cache-tokens 5000 | --rank-memory-gb: can't be used together with --cache-tokens
simulate --arrangement 2x2 | --arrangement: '2x2' is neither colocated:N, xPyD nor conditional:xPyD
simulate --find-goodput | --find-goodput: needs --goodput
simulate --fail decode-9@3 | --fail: no node is called decode-9
simulate --preset mooncake | --dataset-path: the dataset mooncake is a trace and needs its file
simulate --request-rate 0 | --request-rate: 0 is not above 0
simulate --burstiness -1 | --burstiness: -1 is not above 0
simulate --fail decode-0@1.2.3 | --fail: 'decode-0@1.2.3' is not NODE@SECONDS or NODE@SECONDS+SECONDS
simulate --seed -1 | Invalid value for '--seed': -1 is not in the range x>=0
simulate --draft-tokens 4 | --draft-tokens: needs --draft-share
simulate --fixed-drafts | --fixed-drafts: needs --draft-share
simulate --draft-share 1.5 | Invalid value for '--draft-share': 1.5 is not in the range 0<=x<=1
simulate --draft-share 0.5 --draft-tokens 65 | Invalid value for '--draft-tokens': 65 is not in the range 1<=x<=64
simulate --draft-share nan | Invalid value for '--draft-share': 'nan' is not a number
simulate --draft-share 0.5 --draft-row-ms inf | --draft-row-ms: must be a duration, not inf
simulate ttft:500 | unexpected argument 'ttft:500'; limits of an SLO follow --goodput
simulate --arrangement 3p2d --cells 2 | --cells: 2 can't share the nodes of 3p2d, or the concurrency, evenly
simulate --dataset-name azure --dataset-path trace.csv --request-rate 3 | --request-rate: a trace has its own arrivals;
doctor --dtype float64 | Invalid value for '--dtype'
"""
"""Command lines, and how what is said to them begins."""


@pytest.mark.parametrize(("words", "said"), [line.split(" | ") for line in REFUSED.strip().splitlines()])
def test_a_wrong_command_line_is_refused_in_one_line(
    folder: Path, words: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.iterdir())
    assert command.main(words.split()) == 2
    assert sorted(folder.iterdir()) == before
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
