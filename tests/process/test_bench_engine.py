"""`baton bench engine` as a user runs it, on a small model."""

from __future__ import annotations

import json
from pathlib import Path

from tests.process.shell import Shell


def test_ranks_are_measured_against_one_process(shell: Shell, model: Path) -> None:
    ask = ("bench", "engine", "--model", model, "--context-tokens", 32, "--steps", 6, "--threads", 2, "--tp", 2)
    done = shell.baton(*ask, "-o", "json", timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(done.stdout)
    assert [one["step"] for one in figures] == ["prefill", "decode 1", "decode 8", "decode 16"]
    for one in figures:
        assert min(one["tokens_per_s"], one["one_process_tokens_per_s"]) > 0
        assert one["ratio_p10"] <= one["ratio"] <= one["ratio_p90"]
