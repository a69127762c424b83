"""`baton bench engine` as a user runs it, on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.process.shell import Shell


@pytest.mark.timeout(300)  # It reads a gigabyte a hundred times, to know what could be.
def test_the_engine_is_measured_and_compared_with_the_machine(shell: Shell, model: Path) -> None:
    ask = ("bench", "engine", "--model", model, "--context-tokens", 32, "--steps", 6, "--threads", 1)
    done = shell.baton(*ask, "-o", "json", timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert (report["threads"], report["context_tokens"], report["bit_exact"]) == (1, 32, True)
    assert 0 < report["attention_shared_ms"] < report["attention_apart_ms"]
    for key in ("prefill_tokens_per_s", "prefill_share_of_product_rate", "attention_speedup", "read_gb_per_s"):
        assert report[key] > 0, key
    assert [one["batch"] for one in report["decode"]] == [1, 8, 16]
    for one in report["decode"]:
        assert one["tokens_per_s"] > 0
        assert one["share"] > 0
        assert one["step_ms_p10"] <= one["step_ms"] <= one["step_ms_p90"]
    assert report["read_gb_per_s_p10"] <= report["read_gb_per_s"] <= report["read_gb_per_s_p90"]
    assert 0 <= report["bit_exact_cost"] < 1
    assert [one["step"] for one in report["time_split"]] == ["prefill", "decode 1", "decode 8", "decode 16"]
    assert all(one["products_ms"] > 0 and one["python_ms"] > 0 for one in report["time_split"])


def test_ranks_are_measured_against_one_process(shell: Shell, model: Path) -> None:
    ask = ("bench", "engine", "--model", model, "--context-tokens", 32, "--steps", 6, "--threads", 2, "--tp", 2)
    done = shell.baton(*ask, "-o", "json", timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(done.stdout)
    assert [one["step"] for one in figures] == ["prefill", "decode 1", "decode 8", "decode 16"]
    for one in figures:
        assert min(one["tokens_per_s"], one["one_process_tokens_per_s"]) > 0
        assert one["ratio_p10"] <= one["ratio"] <= one["ratio_p90"]
