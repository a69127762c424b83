"""The comparison with other engines: how rounds are merged, failures listed and weights named. Installs nothing."""

from __future__ import annotations

from argparse import Namespace

import pytest

from tests.support.load_script import load_script

compare = load_script("compare_engines")
OPTIONS = Namespace(threads=2, shape="0.5b", precision="bf16", context=100, rounds=2)


def round_of(seconds: float) -> dict[str, object]:
    decode = {"1": [seconds], "8": [seconds], "16": [seconds]}
    return {"version": "1", "settings": {}, "prefill_s": [seconds * 2], "decode_s": decode}


def test_rounds_are_merged_and_rates_are_medians(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = (compare.Figures(engine) for engine in compare.ENGINES[:2])
    for seconds in (0.1, 0.2, 0.4):
        ours.add_round(round_of(seconds))
    theirs.failed = "could not be installed: no index"
    report = compare._report(OPTIONS, [ours, theirs])
    first, second = report["engines"]
    assert first["prefill"]["tokens_per_s"] == pytest.approx(100 / 0.4)
    assert [one["batch"] for one in first["decode"]] == [1, 8, 16]
    assert first["decode"][1]["tokens_per_s"] == pytest.approx(8 / 0.2)
    assert first["decode"][1]["tokens_per_s_p10"] == pytest.approx(8 / 0.4)
    assert first["decode"][1]["step_ms"] == pytest.approx(200)
    assert second == {"engine": "OpenVINO GenAI", "failed": "could not be installed: no index"}
    compare._print_table(report)
    printed = capsys.readouterr().out.splitlines()
    assert printed[3].split()[:3] == ["Baton", "1", "250"]
    assert "could not be installed: no index" in printed[4]


def test_weights_have_the_names_of_gguf() -> None:
    names = load_script("compare_engines_llama_cpp")._gguf_name
    assert names("model.embed_tokens.weight") == "token_embd.weight"
    assert names("model.norm.weight") == "output_norm.weight"
    assert names("model.layers.7.self_attn.q_proj.bias") == "blk.7.attn_q.bias"
    assert names("model.layers.0.input_layernorm.weight") == "blk.0.attn_norm.weight"
    assert names("model.layers.0.mlp.down_proj.weight") == "blk.0.ffn_down.weight"
