"""The cost of a constraint is borne by a child process: bombs end it, are refused by name, and affect nothing else."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from baton.errors import InvalidRequest, Overloaded
from baton.messages.sampling import ConstraintKind
from baton.text.bounded_workers import BoundedWorkers, WorkLimits
from baton.text.constraint_checker import ConstraintChecker
from tests.support.schema_bombs import schema_bomb

GOOD = '{"type": "object"}'
FAR_AWAY_S = 60.0


class Checker(ConstraintChecker):
    """A checker with child processes of its own."""

    def __init__(self, limits: WorkLimits | None = None) -> None:
        self.workers = BoundedWorkers(limits)
        super().__init__(self.workers)

    @property
    def pids(self) -> set[int]:
        return self.workers.pids


@pytest.fixture
def checker() -> Iterator[Checker]:
    checker = Checker(WorkLimits(cpu_s=FAR_AWAY_S, wall_s=FAR_AWAY_S))
    yield checker
    checker.close()
    assert not checker.pids


def refusal(checker: Checker, schema: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        checker.check(schema)
    assert caught.value.field == "json_schema"
    return caught.value.reason


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("regex", "a+", "(a"),
        ("choice", '["a", "b"]', ""),
        ("grammar", 'start: "a"', "start: start"),
    ],
)
def test_other_constraints_are_checked_by_their_kind(
    checker: Checker, kind: ConstraintKind, good: str, bad: str
) -> None:
    checker.check(good, kind)
    assert checker.check_known(good, kind)
    assert not checker.check_known(good, "json_schema"), "a verdict is of one kind"
    if kind != "choice":
        with pytest.raises(InvalidRequest) as caught:
            checker.check(bad, kind)
        assert caught.value.field == kind
    assert len(checker.pids) == 1, "the same child checks all kinds"


BOMBS: dict[str, tuple[ConstraintKind, str]] = {
    "long pattern": ("regex", "(a|b)*" * 4000),
    "repetitions": ("regex", "((((a{1,100}){1,100}){1,100}){1,100}){1,100}b"),
    "intersection": ("grammar", "start: X\nX: " + " & ".join(f"/.*a.{{{size}}}/" for size in range(22))),
    "long terminal": ("grammar", 'start: X\nX: ("ab"~1000)~1000'),
    "deep rules": ("grammar", "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(4000)) + '\nr4000: "a"'),
    "doubling rules": (
        "grammar",
        "start: r0\n" + "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(60)) + '\nr60: "a"',
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_of_every_kind_are_refused_by_name_and_end_at_most_their_child(name: str) -> None:
    kind, text = BOMBS[name]
    checker = Checker()
    try:
        with pytest.raises(InvalidRequest) as caught:
            checker.check(text, kind)
        assert caught.value.field == kind
        assert len(str(caught.value)) < 300
        checker.check("a+", "regex")
    finally:
        checker.close()


def test_a_grammar_that_needs_too_much_stack_is_refused_with_advice(checker: Checker) -> None:
    kind, deep_rules = BOMBS["deep rules"]
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"^grammar: is nested too deeply: make it simpler$"):
            checker.check(deep_rules, kind)
        assert not checker.pids, "the verdict is known, so no second child is started"


@pytest.mark.parametrize("texts", [["x" * 65_536], [f"{number:06d}" for number in range(10_000)], ["a", "ab"] * 5000])
def test_the_largest_choices_are_served(checker: Checker, texts: list[str]) -> None:
    checker.check(json.dumps(texts), "choice")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_valid_schemas_pass_and_invalid_ones_are_refused_with_the_reason(checker: Checker) -> None:
    checker.check(GOOD)
    assert "must be a JSON object" in refusal(checker, "true")
    assert "at most 65536 are taken" in refusal(checker, json.dumps({"description": "x" * 65536}))
    assert "not valid UTF-8" in refusal(checker, '"\ud800"')
    assert len(checker.pids) == 1


def test_a_schema_that_exhausts_the_memory_ends_its_child_process_alone(checker: Checker) -> None:
    checker.check(GOOD)
    (first,) = checker.pids
    assert refusal(checker, schema_bomb()) == "needs more than 64 MiB of memory: make it simpler"
    assert not is_running(first)
    checker.check('{"type": "array"}')
    assert first not in checker.pids


def test_a_schema_that_exhausts_the_time_ends_its_child_process_alone() -> None:
    checker = Checker(WorkLimits(cpu_s=0.05, wall_s=FAR_AWAY_S, memory_bytes=4 << 30))
    assert refusal(checker, schema_bomb()) == "takes more than 0.05 s of CPU time: make it simpler"
    assert not checker.pids
    checker.check(GOOD)
    checker.close()


def test_a_schema_whose_child_gets_no_core_is_refused_and_may_be_retried() -> None:
    hasty = Checker(WorkLimits(cpu_s=FAR_AWAY_S, wall_s=0.05, memory_bytes=16 << 30))
    assert "within 0.05 s" in refusal(hasty, schema_bomb())
    assert not hasty.pids
    assert not hasty.check_known(schema_bomb())
    hasty.close()


def test_a_known_schema_needs_no_child_process(checker: Checker) -> None:
    assert not checker.check_known(GOOD)
    checker.check(GOOD)
    reason = refusal(checker, schema_bomb())
    assert not checker.pids
    checker.check(GOOD)
    assert checker.check_known(GOOD)
    assert refusal(checker, schema_bomb()) == reason
    with pytest.raises(InvalidRequest):
        checker.check_known(schema_bomb())
    assert not checker.pids


def test_a_schema_whose_child_was_killed_is_refused_only_for_a_while(checker: Checker) -> None:
    checker.check(GOOD)
    (child,) = checker.pids
    os.kill(child, signal.SIGKILL)
    assert "ended with -9" in refusal(checker, '{"type": "array"}')
    checker.check('{"type": "array"}')


def test_closing_ends_running_compilations(checker: Checker) -> None:
    roomy = Checker(WorkLimits(cpu_s=FAR_AWAY_S, wall_s=FAR_AWAY_S, memory_bytes=16 << 30))
    roomy.check(GOOD)
    (child,) = roomy.pids
    os.kill(child, signal.SIGSTOP)
    errors: list[BaseException] = []

    def check() -> None:
        try:
            roomy.check('{"type": "array"}')
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=check)
    thread.start()
    roomy.close()
    thread.join(FAR_AWAY_S)
    assert isinstance(errors[0], Overloaded)
    assert not is_running(child)
    with pytest.raises(Overloaded, match="shutting down"):
        roomy.check('{"type": "string"}')


PARENT = """
import sys, threading
from baton.text.bounded_workers import BoundedWorkers, WorkLimits
from baton.text.constraint_checker import ConstraintChecker
from tests.support.schema_bombs import schema_bomb
workers = BoundedWorkers(WorkLimits(cpu_s=600.0, wall_s=600.0, memory_bytes=1 << 40))
checker = ConstraintChecker(workers)
checker.check('{"type": "object"}')
threading.Thread(target=checker.check, args=(sys.argv[1],), daemon=True).start()
print(*workers.pids, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("schema", [GOOD, schema_bomb(19)], ids=["idle", "at work"])
def test_child_processes_end_with_their_parent_however_it_ends(schema: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, schema], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_running(child)
        descriptor = os.pidfd_open(child)
        parent.kill()
    # Readable when the process has ended.
    ended, _, _ = select.select([descriptor], [], [], FAR_AWAY_S)
    os.close(descriptor)
    assert ended


def test_child_processes_get_no_secrets(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_API_KEY", "a secret")
    checker.check(GOOD)
    (child,) = checker.pids
    with open(f"/proc/{child}/environ") as file:
        assert "secret" not in file.read()


def test_child_processes_can_open_no_file_and_start_no_process(checker: Checker) -> None:
    checker.check(GOOD)
    (child,) = checker.pids
    with open(f"/proc/{child}/limits") as file:
        limits = {line[:26].strip(): line[26:].split()[:2] for line in file}
    assert all(limits[name] == ["0", "0"] for name in ("Max open files", "Max processes", "Max file size"))
