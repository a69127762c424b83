"""The verdicts of scripts/soak: constant readings pass and growing ones fail, also across kills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.load_script import load_script

MIB = 1 << 20
WARM_UP_S = 600.0


judge = load_script("soak_judge")


def readings(memory: Sequence[float], pids: Sequence[int] | None = None, **counts: Sequence[int]) -> list[Any]:
    """One reading every two minutes; memory is in MiB."""
    return [
        judge.Reading(
            120.0 * (number + 1),
            pids[number] if pids is not None else 7,
            int(value * MIB),
            {name: values[number] for name, values in counts.items()},
        )
        for number, value in enumerate(memory)
    ]


def verdicts(found: Sequence[Any]) -> dict[str, str]:
    lines = judge.judge("a process", found, WARM_UP_S, 0.02, 0.05)
    return {line.figure: line.verdict for line in lines}


def test_constant_readings_pass() -> None:
    found = readings([100.0] * 30, tasks=[12] * 30, descriptors=[20] * 30)
    assert verdicts(found) == {"memory": "PASS", "tasks": "PASS", "descriptors": "PASS"}


def test_growth_during_the_warm_up_alone_passes() -> None:
    warm = [50.0, 70.0, 90.0, 99.0] + [100.0] * 26
    assert verdicts(readings(warm, tasks=[1, 2, 3, 4] + [5] * 26)) == {"memory": "PASS", "tasks": "PASS"}


def test_a_slow_leak_of_memory_fails() -> None:
    lines = judge.judge("a process", readings([100 + 0.2 * n for n in range(30)]), WARM_UP_S, 0.02, 0.05)
    assert [line.verdict for line in lines] == ["FAIL"]
    assert 0.02 < lines[0].growth < 0.05


def test_one_more_task_fails_and_a_single_spike_passes() -> None:
    constant = [100.0] * 30
    assert verdicts(readings(constant, tasks=[12] * 20 + [13] * 10)) == {"memory": "PASS", "tasks": "FAIL"}
    assert verdicts(readings(constant, tasks=[12] * 28 + [13, 12])) == {"memory": "PASS", "tasks": "PASS"}


def test_a_count_that_was_zero_before_fails() -> None:
    assert verdicts(readings([100.0] * 30, threads=[0] * 20 + [1] * 10))["threads"] == "FAIL"


def test_lives_are_compared_at_the_same_age() -> None:
    pids = [life for life in range(5) for _ in range(6)]
    within_each_life = [80.0, 90.0, 95.0, 98.0, 99.0, 100.0] * 5
    assert verdicts(readings(within_each_life, pids, descriptors=[20] * 30)) == {
        "memory": "PASS",
        "descriptors": "PASS",
    }


def test_growth_from_life_to_life_fails() -> None:
    pids = [life for life in range(5) for _ in range(6)]
    descriptors = [20 + life for life in pids]
    assert verdicts(readings([100.0] * 30, pids, descriptors=descriptors))["descriptors"] == "FAIL"
    assert verdicts(readings([100.0 + 5 * life for life in pids], pids)) == {"memory": "FAIL"}


def test_too_few_readings_are_not_judged() -> None:
    assert verdicts(readings([100.0] * 5)) == {"memory": "-"}
    assert verdicts(readings([100.0] * 8, [1, 1, 1, 1, 2, 2, 2, 2])) == {"memory": "-"}


def test_the_minimum_of_several_readings_of_a_moment_counts() -> None:
    assert judge.minimum_counts([{"tasks": 12}, {"tasks": 14}, {"tasks": 13}]) == {"tasks": 12}
    assert judge.minimum_counts([{"keys": 3}, {}]) == {"keys": 0}
