"""`baton bench serve` and `baton bench nodes`: on a running cluster, without one, and interrupted by Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baton.bench.results.result_file import read_result
from tests.support.process_cluster import ProcessCluster

SMALL = ("--random-input-len", "24", "--random-output-len", "6", "--no-progress")


def test_a_load_is_measured_over_both_fronts(cluster: ProcessCluster, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    words = ("bench", "serve", *SMALL, "--num-prompts", "12", "-o", "json", "--processes", "2")
    slo = ("--goodput", "ttft:1e6", "tpot:1e6")
    ran = cluster.baton(*words, "--request-rate", "50", "--result-filename", str(path), *slo)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert (result["completed"], result["failed"]) == (12, 0)
    assert result["total_output_tokens"] == 12 * 6
    assert result["attainment"] == 1
    assert 0 < result["mean_ttft_ms"] <= result["p99_ttft_ms"] <= result["p99_e2el_ms"]
    assert sum(read_result(path)["arrangements"][0]["rates"][0]["outcomes"]["output_length"]) == 12 * 6
    parts = result["arrangements"][0]["rates"][0]["ttft_parts"]
    assert sum(parts.values()) == pytest.approx(result["mean_ttft_ms"], rel=1e-3)

    ran = cluster.baton(*words, "--backend", "openai", "--max-concurrency", "3")
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert (result["completed"], result["total_output_tokens"]) == (12, 12 * 6)


def test_bench_nodes_records_the_metrics_of_nodes_during_a_load(cluster: ProcessCluster) -> None:
    words = ("--num-prompts", "8", "--max-concurrency", "4", "--seed", "5")  # no prompt that a cache knows
    ran = cluster.baton("bench", "nodes", *SMALL[:4], *words, "-o", "json")
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert result["completed"] == 8
    assert result["impossible_spans"] == 0
    watched = result["arrangements"][0]["rates"][0]["node_metrics"]
    assert set(watched) == {"prefill-0", "decode-0"}
    assert all(len(node["seconds"]) == len(node["running"]) >= 1 for node in watched.values())
    timeline = result["arrangements"][0]["rates"][0]["timeline"]
    computed = {node: sum(size for _, _, kind, size in rows if kind != "transfer") for node, rows in timeline.items()}
    assert computed == {"prefill-0": 8 * 24, "decode-0": 8 * 5}, "every token once, and none from before the run"
    moved = [row for row in timeline["decode-0"] if row[2] == "transfer"]
    assert len(moved) >= 8
    assert all(size > 0 for _, _, _, size in moved)
    assert all(-0.1 < begin <= end < result["duration"] + 0.1 for rows in timeline.values() for begin, end, *_ in rows)


async def _until_busy(cluster: ProcessCluster) -> None:
    async with cluster.session() as session:
        await session.wait_for_status(lambda status: sum(node.running for node in status.nodes) > 1)


def test_ctrl_c_keeps_the_results_so_far(cluster: ProcessCluster, tmp_path: Path) -> None:
    path = tmp_path / "partial.json"
    words = ("bench", "serve", *SMALL, "--max-concurrency", "2", "--result-filename", str(path))
    command = [sys.executable, "-P", "-m", "baton.cli.main", *words, "--num-prompts", "1000000"]
    command += ["--run-dir", str(cluster.run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as bench:
        asyncio.run(_until_busy(cluster))
        os.kill(bench.pid, signal.SIGINT)
        said, noted = bench.communicate(timeout=60)
    assert bench.returncode == 130, noted
    assert "Successful requests" in said
    assert noted.splitlines()[-1] == f"baton: interrupted: the figures until then are printed, and in {path}"
    result = read_result(path)
    assert result["is_complete"] is False
    assert result["completed"] == len(result["arrangements"][0]["rates"][0]["outcomes"]["index"])


def test_a_load_that_can_not_be_measured_ends_with_an_error(cluster: ProcessCluster, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 3, "hash_ids": [1]}\n{"timestamp": 1}\n')
    for words, code, story in (
        (("--port", "1"), 5, "127.0.0.1:1"),
        (("--dataset-name", "mooncake", "--dataset-path", str(trace)), 2, "trace.jsonl:2: input_length is missing"),
        (("--dataset-name", "azure", "--dataset-path", str(trace)), 2, "trace.jsonl:1: the header"),
        (("--goodput", "tft:3"), 2, "--goodput"),
        (("--random-input-len", "1000000"), 2, "tokens, prompt and output together"),
    ):
        ran = cluster.baton("bench", "serve", "--num-prompts", "2", *words)
        assert ran.returncode == code, ran.stderr
        assert story in ran.stderr
        assert "Traceback" not in ran.stderr
