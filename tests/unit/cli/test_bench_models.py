"""Benchmarks and the doctor take what `baton up --model` takes, and show a model by the name that a person gave."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.bench.live_cluster import model_flags
from baton.cli import main as command
from baton.cli.bench.options import chosen_model, named_model
from baton.cli.views.doctor_facts import model_facts
from baton.config import UpConfig, bundled_model_dir
from baton.errors import UsageError
from baton.models.resolve import FoundModel
from tests.support.parsed_flags import config_from_flags
from tests.support.quantized_models import PACKED_FORMATS, write_quantized_model


@pytest.mark.parametrize(
    "words",
    [
        ["engine", "--model"],
        ["handoff", "--model"],
        ["router", "--model"],
        ["compare", "--model"],
        ["nodes", "--start", "1p1d", "--model"],
        ["validate", "--model"],
        ["serve", "--host", "127.0.0.1", "--port", "1", "--tokenizer"],
    ],
)
def test_each_benchmark_converts_a_gguf_file(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "bad.gguf").write_bytes(b"other")
    assert command.main(["bench", *words, str(tmp_path / "bad.gguf")]) == 78
    said = capfd.readouterr().err
    assert said == f"baton: {tmp_path}/bad.gguf is not a sound GGUF file: it does not begin with GGUF\n"


def test_the_tokenizer_of_a_load_needs_no_model_beside_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.json").write_bytes((bundled_model_dir() / "tokenizer.json").read_bytes())
    words = ["--backend", "openai", "--host", "127.0.0.1", "--port", "1", "--model", "any", "--tokenizer"]
    assert command.main(["bench", "serve", *words, str(tmp_path)]) != 0
    # Nothing listens there: the load has come as far as its first request.
    assert capfd.readouterr().err.startswith("baton: 127.0.0.1:1 can't be reached: ")


def test_the_model_of_a_benchmark_has_the_name_that_was_given() -> None:
    assert named_model(None) == FoundModel(bundled_model_dir(), "demo_model")
    with chosen_model(None, "0.5b-kv") as chosen:
        assert chosen.name == "0.5b-kv"
        assert (chosen.directory / "config.json").is_file()
    with pytest.raises(UsageError, match="exclude each other"), chosen_model(Path("smollm2"), "0.5b"):
        pass


@pytest.mark.parametrize("dequantize", [False, True])
def test_the_clusters_of_benchmarks_serve_a_model_as_up_does(dequantize: bool) -> None:
    """`baton up --model smollm2` makes its weights plain, and a benchmark gives its clusters the directory alone."""
    flags = model_flags(FoundModel(Path("made"), "smollm2", dequantize), "float32")
    config = config_from_flags(UpConfig, flags).config
    assert (config.model, config.dtype, config.dequantize) == (Path("made"), "float32", dequantize)


def test_the_doctor_shows_the_name_that_was_given() -> None:
    assert model_facts(FoundModel(bundled_model_dir(), "mine"), "float32", 1).name == "mine"


def test_the_doctor_counts_packed_weights_as_packed(tmp_path: Path) -> None:
    plain = write_quantized_model(tmp_path / "quantised", "llama", PACKED_FORMATS["gptq-int4"])
    packed, dequantised = (
        model_facts(FoundModel(tmp_path / "quantised", "it", dequantize=plainly), "bfloat16", 1).weight_bytes
        for plainly in (False, True)
    )
    assert packed < dequantised == model_facts(FoundModel(plain, "plain"), "bfloat16", 1).weight_bytes
