"""Starts the other stages of a model on this machine, each in a process of its own: on the next GPU, or on its CPU."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence

import torch

from baton.errors import ConfigError
from baton.processes.ends import how_it_ended
from baton.processes.fork_server import start_process
from baton.processes.held_processes import HeldProcesses
from baton.runner.parts import divided
from baton.runner.spec import TorchSpec
from baton.runner.stages.frames import StageLinks
from baton.runner.stages.stage_leader import StageLeader

StartStages = Callable[[TorchSpec, torch.device], StageLeader]
"""Starts the stages before the last one: what all stages together load, and the device of the last one."""

STAGE_PROGRAM = "baton.stage.process"
"""The module of a stage's process. It stands above this folder, since it also moves blocks."""
_WAIT_S = 1.0


def start_stages_here(spec: TorchSpec, own_device: torch.device) -> StageLeader:
    """Start the stages before the last: on the GPUs behind its own, if it has one. Raises ConfigError for too few."""
    count = spec.pipeline_parallel
    if own_device.type == "cpu":
        return start_on(["cpu"] * (count - 1), spec)
    first = own_device.index or 0
    if first + count > (there := torch.cuda.device_count()):
        raise ConfigError(
            f"{count} stages need {count} GPUs from cuda:{first} on, and this machine has {there}; give a smaller --pp"
        )
    return start_on([f"cuda:{first + index}" for index in range(1, count)], spec)


def start_on(devices: Sequence[str], spec: TorchSpec) -> StageLeader:
    """Start a stage on each of these devices; the last stage is this process's. They share the threads."""
    shares = divided(spec.num_threads, len(devices) + 1)
    links, processes = [], list[LocalStage]()
    try:
        for index, (device, num_threads) in enumerate(zip(devices, shares, strict=False)):
            ours, theirs = StageLinks.pair((index + 1) * spec.tensor_parallel)
            links.append(ours)
            try:
                processes.append(LocalStage(theirs, spec, num_threads, device))
            finally:
                theirs.close()
        return StageLeader(links, processes, spec.tensor_parallel)
    except BaseException:
        for each in links:
            each.close()
        for process in processes:
            process.kill()
            process.end(_WAIT_S)
        raise


class LocalStage:
    """The process of a stage on this machine (`StageProcess`)."""

    def __init__(self, links: StageLinks, spec: TorchSpec, num_threads: int, device: str) -> None:
        """`links`: the stage's end of the connections, of which its process gets copies."""
        descriptors = [connection.fileno() for connection in links.sockets]
        what = {
            "model_dir": str(spec.model_dir),
            "num_threads": num_threads,
            "device": device,
            "descriptors": descriptors,
        }
        command = [sys.executable, "-m", STAGE_PROGRAM, json.dumps(what)]
        try:
            self._process = start_process(command, descriptors, starts_others=spec.tensor_parallel > 1)
        except OSError as error:
            raise ConfigError(f"the process of a stage can't be started: {error}") from error
        self._ranks = HeldProcesses()
        """The processes that it leads."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def how_it_ended(self) -> str:
        try:
            code = self._process.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            return ""
        return how_it_ended(code)

    def leads(self, pids: Sequence[int]) -> None:
        self._ranks.hold(pids)

    def kill(self) -> None:
        self._process.kill()
        self._ranks.kill()

    def end(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self.kill()
        self._process.wait()
        self._ranks.let_go()
