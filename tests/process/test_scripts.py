"""The scripts as contributors run them: each check detects what it is for. They run on copies of the checkout."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process.shell import ROOT, Shell


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What the scripts work on, with this environment as its .venv."""
    place = tmp_path / "copy"
    for part in ("proto", "scripts", "baton/v1"):
        shutil.copytree(ROOT / part, place / part, ignore=shutil.ignore_patterns("__pycache__"))
    (place / "docs").mkdir()
    for page in ("states.md", "cli-reference.md"):
        shutil.copy(ROOT / "docs" / page, place / "docs")
    (place / ".venv").symlink_to(sys.prefix)
    return place


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def edited_stub(copy: Path) -> str:
    replace(copy / "baton/v1/generation_pb2.pyi", "class GenerateRequest", "class GeneratedRequest")
    return "generation_pb2.pyi"


def changed_proto(copy: Path) -> str:
    replace(copy / "proto/baton/v1/kv_link.proto", "message ", "message Unheard {}\n\nmessage ")
    return "kv_link_pb2.py"


def missing_stub(copy: Path) -> str:
    (copy / "baton/v1/node_pb2_grpc.py").unlink()
    return "node_pb2_grpc.py"


def stub_without_proto(copy: Path) -> str:
    (copy / "baton/v1/gone_pb2.py").touch()
    return "gone_pb2.py"


@pytest.mark.parametrize("change", [edited_stub, changed_proto, missing_stub, stub_without_proto])
def test_stubs_that_are_out_of_date_are_named(shell: Shell, copy: Path, change: Callable[[Path], str]) -> None:
    name = change(copy)
    before = {path: path.read_bytes() for path in (copy / "baton/v1").iterdir()}
    checked = shell.run([str(copy / "scripts/stubs"), "--check"])
    assert (checked.returncode, checked.stdout) == (1, "")
    assert checked.stderr == f"stubs are out of date: {name}; run scripts/stubs\n"
    assert {path: path.read_bytes() for path in (copy / "baton/v1").iterdir()} == before
    assert shell.run([str(copy / "scripts/stubs")]).returncode == 0
    assert shell.run([str(copy / "scripts/stubs"), "--check"]).returncode == 0


def test_diagrams_that_are_out_of_date_are_noticed(shell: Shell, copy: Path) -> None:
    page = copy / "docs/states.md"
    good = page.read_text()
    assert shell.run([str(copy / "scripts/diagrams"), "--check"]).returncode == 0
    replace(page, "stateDiagram-v2\n", "stateDiagram-v2\n    direction LR\n")
    spoilt = page.read_text()
    checked = shell.run([str(copy / "scripts/diagrams"), "--check"])
    assert (checked.returncode, checked.stdout) == (1, "")
    assert checked.stderr == "scripts/diagrams: docs/states.md is out of date; run scripts/diagrams\n"
    assert page.read_text() == spoilt
    assert shell.run([str(copy / "scripts/diagrams")]).returncode == 0
    assert page.read_text() == good


def test_a_state_machine_without_a_place_in_its_page_is_named(shell: Shell, copy: Path) -> None:
    replace(copy / "docs/states.md", "<!-- diagram: lease -->\n", "<!-- diagram: leese -->\n")
    checked = shell.run([str(copy / "scripts/diagrams"), "--check"])
    assert (checked.returncode, checked.stderr) == (1, "scripts/diagrams: docs/states.md has no place for lease\n")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("values.schema.json", '"max-queue"', '"max-queues"'),
        ("values.schema.json", '"minimum": 1, "pattern"', '"pattern"'),
        ("README.md", "| `model.path` |", "| `model.place` |"),
        ("values.yaml", "# Fewest pods.", "# Fewest pods of the role."),
    ],
)
def test_rendered_files_of_the_chart_that_are_out_of_date_are_noticed(
    shell: Shell, copy: Path, name: str, old: str, new: str
) -> None:
    chart = copy / "deploy/helm/baton"
    chart.mkdir(parents=True)
    for file in ("values.yaml", "values.schema.json", "README.md"):
        shutil.copy(ROOT / "deploy/helm/baton" / file, chart)
    assert shell.run([str(copy / "scripts/chart"), "--check"]).returncode == 0
    replace(chart / name, old, new)
    checked = shell.run([str(copy / "scripts/chart"), "--check"])
    rendered = "README.md" if name == "values.yaml" else name
    assert (checked.returncode, checked.stdout) == (1, "")
    assert checked.stderr == f"scripts/chart: deploy/helm/baton/{rendered} is out of date; run scripts/chart\n"
    assert shell.run([str(copy / "scripts/chart")]).returncode == 0
    assert shell.run([str(copy / "scripts/chart"), "--check"]).returncode == 0


@pytest.mark.parametrize(
    ("old", "new"), [("| `--address ADDRESS` |", "| `--addresses` |"), ("## baton get nodes\n", "## baton get node\n")]
)
def test_a_reference_of_commands_that_is_out_of_date_is_noticed(shell: Shell, copy: Path, old: str, new: str) -> None:
    page = copy / "docs/cli-reference.md"
    good = page.read_text()
    assert shell.run([str(copy / "scripts/cli_reference"), "--check"]).returncode == 0
    replace(page, old, new)
    spoilt = page.read_text()
    checked = shell.run([str(copy / "scripts/cli_reference"), "--check"])
    assert (checked.returncode, checked.stdout) == (1, "")
    assert checked.stderr == (
        "scripts/cli_reference: docs/cli-reference.md is out of date; run scripts/cli_reference\n"
    )
    assert page.read_text() == spoilt
    assert shell.run([str(copy / "scripts/cli_reference")]).returncode == 0
    assert page.read_text() == good


def test_a_change_that_users_see_is_shown(shell: Shell, copy: Path) -> None:
    shutil.copytree(ROOT / "tests/outside", copy / "tests/outside")
    (copy / "tests/support").mkdir()
    shutil.rmtree(copy / "baton")
    (copy / "baton").symlink_to(ROOT / "baton")
    shutil.copy(ROOT / "tests/support/outside.py", copy / "tests/support")
    assert shell.run([str(copy / "scripts/outside"), "--check"]).returncode == 0
    replace(copy / "tests/outside/help.txt", "Print the version.", "Print a version.")
    checked = shell.run([str(copy / "scripts/outside"), "--check"])
    assert (checked.returncode, checked.stdout) == (1, "")
    assert "\n-  version     Print a version.\n+  version     Print the version.\n" in checked.stderr
    assert checked.stderr.endswith("scripts/outside: users see a change; if it is meant, run scripts/outside\n")


def test_setup_names_what_is_missing(shell: Shell, copy: Path) -> None:
    for part in ("pyproject.toml", "constraints.txt", "setup.py"):
        shutil.copy(ROOT / part, copy)
    kernels = "baton/runner/backends/cpu/kernels/csrc"
    shutil.copytree(ROOT / kernels, copy / kernels)
    (copy / ".venv").unlink()
    done = shell.run([str(copy / "scripts/setup")], {"CC": "no-such-compiler"})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("scripts/setup: no C compiler (no-such-compiler")
    done = shell.run([str(copy / "scripts/setup")], {"CC": "true", "PYTHON": "no-such-python"})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("scripts/setup: no Python 3.11 or later with the venv module")
    assert not (copy / ".venv").exists()


FAKE_PYTHON = """#!/bin/sh
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip") [ "$3" = --version ] || { echo "$@" >>"$LOG"; exit "${CODE_OF_PIP:-0}"; } ;;
    "-c from importlib.metadata "*) echo "$TORCH" ;;
    "-c import sys, urllib"*) echo "asks $3" >>"$LOG"; exit "$CODE_OF_INDEX" ;;
    "--version "*) echo "Python 3.11.0" ;;
esac
"""


CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(
    ("named", "reachable", "asked", "given"),
    [
        (None, "0", f"{CPU_INDEX}/torch/", ["--extra-index-url", CPU_INDEX]),
        (None, "1", f"{CPU_INDEX}/torch/", []),
        ("https://x/cu", "0", "https://x/cu/torch/", ["--extra-index-url", "https://x/cu"]),
        ("", "0", None, []),
    ],
)
def test_setup_says_what_it_does_and_takes_torch_from_its_own_index_where_that_is_reachable(
    shell: Shell, copy: Path, named: str | None, reachable: str, asked: str | None, given: list[str]
) -> None:
    for part in ("pyproject.toml", "constraints.txt", "setup.py"):
        shutil.copy(ROOT / part, copy)
    kernels = "baton/runner/backends/cpu/kernels/csrc"
    shutil.copytree(ROOT / kernels, copy / kernels)
    (copy / ".venv").unlink()
    python = copy / "fake-python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    log = copy / "log"
    settings = {"CC": "true", "PYTHON": str(python), "LOG": str(log), "CODE_OF_INDEX": reachable}
    settings |= {} if named is None else {"TORCH_INDEX": named}
    failed = shell.run([str(copy / "scripts/setup")], settings | {"CODE_OF_PIP": "1"})
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.splitlines()[-1].startswith("scripts/setup: pip failed, see above: when the cause is mended")
    shutil.rmtree(copy / ".venv")
    first, second = (shell.run([str(copy / "scripts/setup")], settings) for _ in range(2))
    assert (first.returncode, first.stdout) == (0, "")
    stages = [line.partition(" (after ")[0].removeprefix("scripts/setup: ") for line in first.stderr.splitlines()]
    assert stages == [
        "1 of 3: makes .venv with Python 3.11.0",
        "2 of 3: installs torch",
        "3 of 3: installs the other packages and compiles the C kernels",
        "done",
    ]
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    *index, torch, others = log.read_text().splitlines()[-2 - (asked is not None) :]
    assert index == ([] if asked is None else [f"asks {asked}"])
    version = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    assert torch.split() == [
        *["-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"],
        *given,
        version,
    ]
    assert others.endswith("-c constraints.txt -e .[dev]")


def test_setup_replaces_a_torch_of_another_index_and_keeps_to_the_index_that_was_named(
    shell: Shell, copy: Path
) -> None:
    for part in ("pyproject.toml", "constraints.txt", "setup.py"):
        shutil.copy(ROOT / part, copy)
    kernels = "baton/runner/backends/cpu/kernels/csrc"
    shutil.copytree(ROOT / kernels, copy / kernels)
    (copy / ".venv").unlink()
    python, log = copy / "fake-python", copy / "log"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    settings = {"CC": "true", "PYTHON": str(python), "LOG": str(log), "CODE_OF_INDEX": "0"}

    def uninstalls(**more: str) -> list[str]:
        """The lines of pip that uninstall; none and no line of the log at all if nothing is done."""
        log.write_text("")
        done = shell.run([str(copy / "scripts/setup")], settings | more)
        assert done.returncode == 0, done.stderr
        return [line.split("version-check ")[1] for line in log.read_text().splitlines() if "uninstall" in line]

    gone = ["uninstall --quiet --yes torch"]
    assert uninstalls(TORCH="") == []
    assert uninstalls(TORCH="2.13.0+cpu", TORCH_INDEX="https://x/cu130") == gone
    for done in ({}, {"TORCH_INDEX": "https://x/cu130"}):
        assert uninstalls(TORCH="2.13.0+cu130", **done) == []
        assert log.read_text() == ""
    assert uninstalls(TORCH="2.13.0+cu130", TORCH_INDEX="") == gone
    assert uninstalls(TORCH="2.13.0", TORCH_INDEX="https://x/cpu", CODE_OF_INDEX="1") == []
    assert uninstalls(TORCH="2.13.0") == []
    assert log.read_text() == "", "what could not be reached is not tried again"
    (copy / ".venv/.baton-setup").write_text("1 2\n")  # as it was before indexes were remembered
    assert uninstalls(TORCH="2.13.0+cu130") == [], "no index was named"
    assert f"asks {CPU_INDEX}/torch/" in log.read_text()
    interrupted = shell.run(
        [str(copy / "scripts/setup")], settings | {"TORCH": "", "TORCH_INDEX": "", "CODE_OF_PIP": "1"}
    )
    assert interrupted.returncode == 1
    assert uninstalls(TORCH="2.13.0") == [], "what an interrupted run has installed stays"
    assert "install --quiet --no-compile torch==" in log.read_text()


def test_an_interrupted_demo_stops_what_it_started(shell: Shell) -> None:
    command = [sys.executable, "-u", "-m", "baton.cli.main", "demo"]
    with subprocess.Popen(
        command, cwd=ROOT, env=shell.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as demo:
        assert demo.stdout is not None
        assert demo.stdout.readline().decode() == "Starting Redis, a router, a prefill node and a decode node …\n"
        demo.send_signal(signal.SIGINT)
        output, complaint = demo.communicate()
    assert (demo.returncode, complaint) == (130, b"")
    assert output.decode().endswith("interrupted; all processes are stopped\n")
    shell.assert_nothing_left()


def test_a_demo_whose_cluster_does_not_start_fails_as_up_does(shell: Shell) -> None:
    nowhere = shell.home / "nowhere"
    done = shell.run([sys.executable, "-m", "baton.cli.main", "demo", "--model", str(nowhere)])
    assert done.returncode == 78
    assert done.stderr.startswith(f"baton: model directory {nowhere} does not exist")
    assert done.stderr.count("\n") == 1
    shell.assert_nothing_left()


def reused_number(copy: Path) -> str:
    replace(copy / "proto/baton/v1/kv_link.proto", "string incarnation = 4;", "string generation = 4;")
    return 'Field "4" on message "LinkHello" changed name from "incarnation" to "generation"'


def another_type(copy: Path) -> str:
    replace(copy / "proto/baton/v1/kv_link.proto", "uint32 protocol_version = 1;", "string protocol_version = 1;")
    return 'Field "1" with name "protocol_version" on message "LinkHello" changed type from "uint32" to "string"'


def number_left_free(copy: Path) -> str:
    replace(copy / "proto/baton/v1/kv_link.proto", "  string incarnation = 4;\n", "")
    return 'Previously present field "4" with name "incarnation" on message "LinkHello" was deleted'


def missing_call(copy: Path) -> str:
    replace(copy / "proto/baton/v1/kv_link.proto", "rpc Open(stream", "rpc Begin(stream")
    return 'Previously present RPC "Open" on service "KvLink" was deleted'


@pytest.mark.parametrize("change", [reused_number, another_type, number_left_free, missing_call])
def test_a_wire_change_that_the_last_release_does_not_understand_is_refused(
    shell: Shell, copy: Path, change: Callable[[Path], str]
) -> None:
    shutil.copy(ROOT / "buf.yaml", copy)
    assert shell.run([str(copy / "scripts/wire"), "--check"]).returncode == 0
    story = change(copy)
    checked = shell.run([str(copy / "scripts/wire"), "--check"])
    assert checked.returncode == 100
    assert story in checked.stdout


def test_additions_to_the_wire_are_accepted(shell: Shell, copy: Path) -> None:
    shutil.copy(ROOT / "buf.yaml", copy)
    replace(
        copy / "proto/baton/v1/kv_link.proto", "string incarnation = 4;", "string incarnation = 4;\n  bool new = 99;"
    )
    assert shell.run([str(copy / "scripts/wire"), "--check"]).returncode == 0
    assert shell.run([str(copy / "scripts/wire"), "--release"]).returncode == 0
    replace(copy / "proto/baton/v1/kv_link.proto", "bool new = 99;", "bool renewed = 99;")
    assert shell.run([str(copy / "scripts/wire"), "--check"]).returncode == 100


def failing_project(place: Path) -> Path:
    """Three tests, of which one fails at its first run and one at each."""
    (place / "pytest.ini").write_text("[pytest]\n")  # else a project around this place would be taken for theirs
    (place / "test_it.py").write_text(
        "from pathlib import Path\n"
        "def test_well(): pass\n"
        "def test_now_and_then():\n"
        "    ran = Path('ran')\n"
        "    was_there = ran.exists()\n"
        "    ran.touch()\n"
        "    assert was_there\n"
        "def test_always():\n"
        "    assert Path('mended').exists()\n"
    )
    return place


def test_a_failed_test_runs_once_more_by_itself(shell: Shell, tmp_path: Path) -> None:
    place = failing_project(tmp_path)
    again = [sys.executable, str(ROOT / "scripts/rerun_failed.py")]
    first = shell.run([sys.executable, "-m", "pytest", "-q"], cwd=place)
    assert "2 failed, 1 passed" in first.stdout
    rerun = shell.run(again, cwd=place)
    assert rerun.returncode == 1
    assert "flaky: test_it.py::test_now_and_then" in rerun.stdout
    assert "failed twice: test_it.py::test_always" in rerun.stdout
    (place / "mended").touch()
    assert shell.run(again, cwd=place).returncode == 0


def test_no_failed_tests_to_run_again_is_an_error(shell: Shell, tmp_path: Path) -> None:
    """pytest may fail without a failed test; a run that left no list has not passed."""
    again = [sys.executable, str(ROOT / "scripts/rerun_failed.py")]
    rerun = shell.run(again, cwd=tmp_path)
    assert rerun.returncode == 1
    assert "no list of failed tests" in rerun.stderr
