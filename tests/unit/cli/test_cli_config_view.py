"""`baton config view`: every key, its value and its origin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.cli.main import main


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_source_with_precedence_is_used_and_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "baton.toml").write_text("threads = 2\n[node]\nmax_num_seqs = 7\nblock_size = 32\n")
    monkeypatch.setenv("BATON_BLOCK_SIZE", "8")
    assert main(["config", "view", "node", "--origin", "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["max_num_seqs"] == {"value": 7, "origin": "baton.toml [node]"}
    assert found["block_size"] == {"value": "8", "origin": "BATON_BLOCK_SIZE"}
    assert found["drain_s"] == {"value": 30.0, "origin": "default"}
    assert found["role"] == {"value": None, "origin": "required"}
    assert main(["config", "view", "node"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["KEY", "VALUE"]
    assert ["max_num_seqs", "7"] in [line.split() for line in lines]


@pytest.mark.parametrize("form", [(), ("-o", "json"), ("-o", "yaml"), ("--origin",)])
def test_passwords_are_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: tuple[str, ...]
) -> None:
    monkeypatch.setenv("BATON_REGISTRY", "redis://me:s3cret@host:1?password=s3cret")
    for process in ("up", "node", "router"):
        assert main(["config", "view", process, *form]) == 0
        output = capsys.readouterr().out
        assert "redis://***@host:1?password=***" in output
        assert "s3cret" not in output


def test_invalid_settings_are_refused_by_config_view_as_well(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "baton.toml").write_text("[node]\nmax_num_seq = 7\n")
    assert main(["config", "view"]) == 78
    assert "did you mean max_num_seqs?" in capsys.readouterr().err
    (directory / "baton.toml").write_text("")
    monkeypatch.setenv("BATON_BLOCK_SIZE", "none")
    assert main(["config", "view", "node"]) == 78
    assert "block_size 'none' from BATON_BLOCK_SIZE" in capsys.readouterr().err
