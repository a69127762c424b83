"""scripts/gpu_results publishes the newest figures of each card, none of a CPU, and notices an outdated page."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.load_script import load_script

PAGE = "# Results\n<!-- gpu: results -->\nold\n<!-- end -->\nprose\n"
CARD = "NVIDIA H100 80GB HBM3"


@pytest.fixture(scope="module")
def gpu_results() -> ModuleType:
    return load_script("gpu_results")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "gpu.md").write_text(PAGE)
    return tmp_path / "gpu.md"


def write(page: Path, name: str, ms: float, **about: Any) -> None:
    """Write a result file with a prompt's time, transformers' beside it, a check that failed and a size left out."""
    run = {
        "device": "cuda",
        "size": "full",
        "card": CARD,
        "date": name,
        "commit": "c0ffee",
        "python": "3.12.3",
        **about,
    }
    prompt = {"shape": "1b", "tokens": 2048, "ms_min": ms, "ms": ms + 1, "tokens_per_s": 2048 / ms * 1e3}
    peer = {"shape": "1b", "tokens": 2048, "ms_min": 8.0, "ms": 9.0, "tokens_per_s": 256000.0}
    lines = [
        {"kind": "run", "fields": run},
        {"kind": "report", "stage": "engine", "name": "prompt", "fields": prompt},
        {"kind": "check", "stage": "engine", "name": "1b is bit-exact", "ok": False, "fields": {}},
        {"kind": "report", "stage": "engine", "name": "8b runner", "fields": {"left_out": "needs 40.0 GB"}},
        {"kind": "end", "stage": "engine", "outcome": "failed", "seconds": 61.5},
        {"kind": "report", "stage": "transformers", "name": "prompt", "fields": peer},
        {"kind": "end", "stage": "transformers", "outcome": "passed", "seconds": 12.0},
        {"kind": "end", "stage": "pair", "outcome": "left out", "seconds": 0.0},
    ]
    page.with_name(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def run(gpu_results: ModuleType, page: Path, *more: str) -> int:
    status: int = gpu_results.main(["--page", str(page), "--results", str(page.parent), *more])
    return status


def test_figures_of_both_stand_side_by_side_and_nothing_is_hidden(gpu_results: ModuleType, page: Path) -> None:
    write(page, "h100-2026-12-01", 37.5)
    assert run(gpu_results, page, "--check") == 1
    assert run(gpu_results, page) == 0
    assert run(gpu_results, page, "--check") == 0
    text = page.read_text()
    assert text.startswith("# Results\n<!-- gpu: results -->\n")
    assert text.endswith("<!-- end -->\nprose\n")
    for line in (
        "| 1b | 2,048 | 37.5 | 54,613 | 8.00 | 4.69 |",
        "| engine | failed | 61.5 | 0 of 1 | 1b is bit-exact |",
        "| pair | left out |  | 0 of 0 |  |",
        "| engine | 8b runner | needs 40.0 GB |",
    ):
        assert line in text


def test_a_card_has_its_newest_figures(gpu_results: ModuleType, page: Path) -> None:
    write(page, "h100-2026-12-01", 37.5)
    write(page, "h100-2026-12-02", 9.5)
    write(page, "h200-2026-11-30", 8.5, card="NVIDIA H200")
    assert run(gpu_results, page) == 0
    text = page.read_text()
    assert [line for line in text.splitlines() if line.startswith("###")] == [
        f"### {CARD}, h100-2026-12-02",
        "### NVIDIA H200, h200-2026-11-30",
    ]


@pytest.mark.parametrize("about", [{"device": "cpu", "card": None}, {"size": "tiny"}], ids=["CPU", "tiny"])
def test_figures_that_mean_nothing_are_refused(gpu_results: ModuleType, page: Path, about: dict[str, Any]) -> None:
    write(page, "h100-2026-12-01", 37.5, **about)
    assert run(gpu_results, page) == 1
    assert page.read_text() == PAGE


def test_the_page_is_up_to_date(gpu_results: ModuleType, page: Path) -> None:
    assert gpu_results.main(["--check"]) == 0
    assert gpu_results.render_results(page.parent) == gpu_results.NO_RESULTS


def test_lanes_are_those_of_reads_between_processes(gpu_results: ModuleType) -> None:
    from gpu.lanes import lane_lines

    def table(title: str, kind: str, *rows: str) -> str:
        return "".join(
            f"[1795.3] [vm:2:0]   | {line} |\n" for line in (title, kind, "Range | Description | Config", *rows)
        )

    reads = "remote memory read by ucp_get* into cuda memory from cuda"
    log = (
        table("d-0.x self cfg#0", reads, "0..inf | zero-copy | self/memory")
        + table(
            "d-0.x intra-node cfg#1", "remote memory write by ucp_put* from host", "0..inf | zero-copy | cma/memory"
        )
        + '{"event": "a | b"}\n'
        + table("d-0.x intra-node cfg#1", reads, "0..4000 | copy-out | tcp/lo", "4001..inf | zero-copy | cuda_ipc/cuda")
        * 2
    )
    assert lane_lines(log) == [f"{reads}: 0..4000: copy-out, tcp/lo", f"{reads}: 4001..inf: zero-copy, cuda_ipc/cuda"]
    assert lane_lines("") == []
