"""The comparison with other engines: how rounds are merged, failures listed and weights named. Installs nothing."""

from __future__ import annotations

from argparse import Namespace

import pytest

from tests.support.load_script import load_script

compare = load_script("compare_engines")
OPTIONS = Namespace(threads=2, shape="0.5b", gguf=None, precision="bf16", context=100, rounds=2)


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
    assert second == {
        "engine": "OpenVINO GenAI",
        "format": "bf16",
        "weights": "",
        "failed": "could not be installed: no index",
    }
    compare._print_table(report)
    printed = capsys.readouterr().out.splitlines()
    assert printed[3].split()[:3] == ["Baton", "1", "250"]
    assert "could not be installed: no index" in printed[4]


def test_each_format_is_compared_with_the_best_of_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    baton, openvino, llama = compare.ENGINES
    ours = compare.Figures(baton, "int4", "int4")
    ours.add_round({**round_of(0.1), "floor_s": {"1": 0.08, "8": 0.05, "16": 0.04}})
    others = [compare.Figures(engine, "int4", "q") for engine in (openvino, llama)]
    others[0].add_round(round_of(0.2))
    others[1].add_round(round_of(0.15))
    alone = compare.Figures(baton, "int8", "int8")
    alone.add_round(round_of(0.1))
    report = compare._report(OPTIONS, [alone, ours, *others])
    assert report["engines"][1]["decode"][0]["floor_ms"] == pytest.approx(80)
    assert report["engines"][1]["decode"][2]["step_per_floor"] == pytest.approx(2.5)
    assert "floor_ms" not in report["engines"][0]["decode"][0]
    compare._print_table(report)
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert printed[3][:3] == ["Baton", "int8", "1"]
    assert printed[8:] == [
        ["step", "/", "floor", "-", "1.25", "2.00", "2.50"],
        ["Baton", "/", "best", "1.50", "1.50", "1.50", "1.50"],
    ]


def test_every_engine_names_every_format() -> None:
    for engine in compare.ENGINES:
        assert tuple(form for form in engine.weights if form != compare.GGUF) == compare.FORMATS
        assert all(engine.weights.values())


def test_weights_have_the_names_of_gguf() -> None:
    names = load_script("compare_engines_llama_cpp")._gguf_name
    assert names("model.embed_tokens.weight") == "token_embd.weight"
    assert names("model.norm.weight") == "output_norm.weight"
    assert names("model.layers.7.self_attn.q_proj.bias") == "blk.7.attn_q.bias"
    assert names("model.layers.0.input_layernorm.weight") == "blk.0.attn_norm.weight"
    assert names("model.layers.0.mlp.down_proj.weight") == "blk.0.ffn_down.weight"
