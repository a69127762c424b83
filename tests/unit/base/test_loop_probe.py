"""How long an event loop was blocked: by which clock, turn by turn, and the figures of a process about itself."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.observe.loop_probe import READY_AT_ONCE, WINDOW_S, Longest, LoopProbe, ProbedEventLoop
from baton.observe.metrics import render
from baton.observe.process_figures import process_figures


class Clocks:
    """The wall clock and the CPU clock of the thread, moved by hand."""

    def __init__(self) -> None:
        self.wall = 1000.0
        self.cpu = 7.0

    def run(self, wall: float, cpu: float) -> None:
        self.wall += wall
        self.cpu += cpu


def samples(page: bytes) -> dict[str, float]:
    """Return samples by name, those of a histogram also by bound."""
    return {
        sample.name.removeprefix("baton_") + sample.labels.get("le", ""): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def probed() -> tuple[LoopProbe, Clocks]:
    clocks = Clocks()
    return LoopProbe(lambda: clocks.wall, lambda: clocks.cpu), clocks


def turn(probe: LoopProbe, clocks: Clocks, wall: float, cpu: float) -> None:
    """Run one turn, and a wait after it that takes no CPU time."""
    probe.begin_turn()
    clocks.run(wall, cpu)
    probe.end_turn()
    clocks.run(0.5, 0.0)


def read_figures(probe: LoopProbe) -> dict[str, float]:
    return samples(render(probe.figures(), {}))


def test_a_turn_lasts_from_one_poll_of_the_sockets_to_the_next() -> None:
    probe, clocks = probed()
    turn(probe, clocks, 0.120, 0.120)
    turn(probe, clocks, 0.030, 0.030)
    found = read_figures(probe)
    held = "event_loop_held_seconds"
    assert [found[f"{held}_bucket{bound}"] for bound in ("0.025", "0.05", "0.1", "0.15", "+Inf")] == [0, 1, 1, 2, 2]
    assert (found[f"{held}_max"], found[f"{held}_sum"]) == pytest.approx((0.120, 0.150))


def test_a_turn_in_which_other_processes_ran_is_long_in_wall_time_only() -> None:
    probe, clocks = probed()
    turn(probe, clocks, 0.400, 0.020)
    found = read_figures(probe)
    assert found["event_loop_held_seconds_max"] == pytest.approx(0.400)
    assert found["event_loop_held_cpu_seconds_max"] == pytest.approx(0.020)
    assert (found["event_loop_held_seconds_bucket0.3"], found["event_loop_held_cpu_seconds_bucket0.025"]) == (0, 1)


def test_short_turns_are_counted_and_not_added_to_a_long_one() -> None:
    probe, clocks = probed()
    for _ in range(1000):
        probe.begin_turn()
        clocks.run(0.0005, 0.0005)
        probe.end_turn()
    turn(probe, clocks, 0.050, 0.010)
    found = read_figures(probe)
    assert (found["event_loop_held_seconds_bucket0.001"], found["event_loop_held_seconds_count"]) == (1000, 1001)
    assert found["event_loop_held_seconds_sum"] == pytest.approx(0.55)
    # The processor's clock may have been read up to 5 ms before.
    assert 0.010 <= found["event_loop_held_cpu_seconds_max"] <= 0.015 + 1e-9
    assert read_figures(probe)["event_loop_held_seconds_count"] == 1001


def test_the_longest_turn_is_forgotten_after_two_windows() -> None:
    longest = Longest(10.0)
    longest.observe(5.0, 3.0)
    longest.observe(12.0, 1.0)
    assert [longest.value(at) for at in (13.0, 19.9, 20.0, 29.9, 30.0, 500.0)] == [3.0, 3.0, 1.0, 1.0, 0.0, 0.0]
    longest.observe(501.0, 2.0)
    assert longest.value(501.0) == 2.0


def test_the_longest_turn_survives_a_scrape() -> None:
    probe, clocks = probed()
    turn(probe, clocks, 0.2, 0.2)
    assert read_figures(probe)["event_loop_held_seconds_max"] == read_figures(probe)["event_loop_held_seconds_max"] > 0
    clocks.run(2 * WINDOW_S, 0.0)
    assert read_figures(probe)["event_loop_held_seconds_max"] == 0


def test_a_probed_loop_measures_each_turn() -> None:
    class Counting(ProbedEventLoop):
        """A loop whose turns take a second of wall time and no CPU time."""

        def __init__(self) -> None:
            super().__init__()
            self.clocks = Clocks()
            self.probe._clock, self.probe._cpu_clock = lambda: self.clocks.wall, lambda: self.clocks.cpu

    async def run() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Counting)
        before = read_figures(loop.probe)["event_loop_held_seconds_count"]
        for _ in range(3):
            loop.clocks.run(1.0, 0.25)
            await asyncio.sleep(0)
        found = read_figures(loop.probe)
        assert found["event_loop_held_seconds_count"] - before == 3
        assert found["event_loop_held_seconds_max"] == 1.0
        assert found["event_loop_held_cpu_seconds_max"] == 0.25

    with asyncio.Runner(loop_factory=Counting) as runner:
        runner.run(run())


@pytest.mark.parametrize("loop_factory", [ProbedEventLoop, asyncio.SelectorEventLoop])
def test_a_process_reports_its_descriptors_threads_tasks_and_memory(
    loop_factory: type[asyncio.SelectorEventLoop],
) -> None:
    async def run() -> None:
        before = samples(render(process_figures(), {}))
        waiting = [asyncio.create_task(asyncio.Event().wait()) for _ in range(3)]
        pair = socket.socketpair()
        after = samples(render(process_figures(), {}))
        assert after["event_loop_tasks"] - before["event_loop_tasks"] == 3
        assert after["process_open_fds"] - before["process_open_fds"] == 2
        assert after["process_threads"] == len(os.listdir("/proc/self/task"))
        assert after["process_resident_memory_bytes"] > 1 << 20
        assert after["process_cpu_seconds_total"] > 0
        assert ("event_loop_held_seconds_max" in after) is (loop_factory is ProbedEventLoop)
        for end in pair:
            end.close()
        for task in waiting:
            task.cancel()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())


def test_simultaneously_ready_sockets_are_handled_over_several_turns() -> None:
    loop, heard = ProbedEventLoop(), list[int]()
    read, write = os.pipe()
    readers = [os.dup(read) for _ in range(2 * READY_AT_ONCE + 10)]
    turns = []

    def hear(reader: int) -> None:
        heard.append(reader)
        loop.remove_reader(reader)

    async def until_all_were_heard() -> None:
        for reader in readers:
            loop.add_reader(reader, hear, reader)
        os.write(write, b"x")
        while len(heard) < len(readers):
            already = len(heard)
            await asyncio.sleep(0)
            turns.append(len(heard) - already)

    try:
        loop.run_until_complete(until_all_were_heard())
    finally:
        loop.close()
        for one in (read, write, *readers):
            os.close(one)
    assert sorted(heard) == sorted(readers)
    assert max(turns) == READY_AT_ONCE
