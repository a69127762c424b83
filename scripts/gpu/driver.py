"""The driver of `scripts/gpu_check`: runs each stage in a process of its own, in order, within a budget of seconds."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gpu.machine import KERNELS_LOG
from gpu.results import Line, Outcome, ResultFile
from gpu.run_stage import CHECK_FAILED
from gpu.stage import Device, Size

GRACE_S = 5.0
"""A stage past its deadline has so many seconds to end what it started, before its whole process group is killed."""
KERNELS = "kernels"
"""The name under which it is said whether the C kernels were built."""
KERNELS_S = 60.0
"""At most so many seconds are waited for the C kernels."""
TAIL_LINES = 40
"""Lines of output that are kept of a stage that didn't pass."""
CPU_DEADLINES = 10
"""On a CPU deadlines are so many times as long: nobody pays for the seconds, and others compute there, too."""


@dataclass(frozen=True)
class Stage:
    """A stage: `module` has `run(context)` and ends within `seconds`."""

    name: str
    module: str
    seconds: float
    needs_kernels: bool = True
    """Whether it waits for the C kernels, if they are being built."""


def find_stages(folder: Path, names: Sequence[str], prefix: str) -> list[Stage]:
    """The stages of these names, in their order; `prefix` stands before a name in the name of its module.

    SECONDS and NEEDS_KERNELS, which is True unless set, are read from the source: importing a stage would import torch,
    in a process that needs none.
    """
    stages = []
    for name in names:
        constants = _constants(folder / f"{name}.py")
        needs_kernels = bool(constants.get("NEEDS_KERNELS", True))
        stages.append(Stage(name, prefix + name, float(constants["SECONDS"]), needs_kernels))
    return stages


def _constants(path: Path) -> dict[str, Any]:
    """The numbers and truth values that a module's upper-case names are set to."""
    constants = {}
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)) if name.isupper():
                constants[name] = value
    return constants


@dataclass
class Driver:
    """Runs stages one after the other and appends to the results how each ended."""

    results: Path
    size: Size
    device: Device
    environment: Mapping[str, str]
    """The environment of the stages' processes."""
    budget: float
    """Seconds for all stages together; a stage whose deadline doesn't fit what is left is left out."""
    kernels: subprocess.Popen[bytes] | None = None
    """The process that builds the C kernels beside the first stages, started in a process group of its own."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def run(self, stages: Sequence[Stage], about: Line) -> None:
        """Run the stages. `about` describes the run. Ctrl-C ends the stage in progress, then is raised again."""
        file, started = ResultFile(self.results), time.monotonic()
        slack = CPU_DEADLINES if self.device == "cpu" else 1
        try:
            file.append({"kind": "run", "fields": about})
            for stage in stages:
                seconds = stage.seconds * slack
                if time.monotonic() - started + seconds > self.budget:
                    self._ended(file, stage, Outcome.LEFT_OUT, 0.0, [])
                    continue
                if stage.needs_kernels and self.kernels is not None:
                    left = self.budget - (time.monotonic() - started)
                    self.outcomes[KERNELS] = _await_kernels(file, self.kernels, min(left, KERNELS_S * slack))
                    self.kernels = None
                self._run_stage(file, stage, seconds)
        finally:
            if self.kernels is not None:
                _end_group(self.kernels)
            file.close()

    def _run_stage(self, file: ResultFile, stage: Stage, seconds: float) -> None:
        print(f"== {stage.name} (at most {seconds:.0f} s)", flush=True)
        command = [sys.executable, "-m", "gpu.run_stage", stage.module, "--stage", stage.name, "--size", self.size]
        command += ["--device", self.device, "--seconds", str(seconds), "--results", str(self.results)]
        started = time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=dict(self.environment),
            process_group=0,
        )
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        reader = threading.Thread(target=_echo, args=(process.stdout, tail), daemon=True)
        reader.start()
        outcome = Outcome.INTERRUPTED
        try:
            outcome = _outcome(process.wait(seconds))
        except subprocess.TimeoutExpired:
            outcome = Outcome.DEADLINE
        finally:
            _end_group(process)
            reader.join(GRACE_S)
            self._ended(file, stage, outcome, time.monotonic() - started, list(tail))

    def _ended(self, file: ResultFile, stage: Stage, outcome: Outcome, seconds: float, tail: list[str]) -> None:
        self.outcomes[stage.name] = outcome
        line: Line = {"kind": "end", "stage": stage.name, "outcome": outcome, "seconds": round(seconds, 2)}
        if outcome not in (Outcome.PASSED, Outcome.LEFT_OUT):
            line["output"] = tail
        file.append(line)
        print(f"== {stage.name}: {outcome} after {seconds:.1f} s", flush=True)


def _await_kernels(file: ResultFile, process: subprocess.Popen[bytes], seconds: float) -> Outcome:
    """Wait until the C kernels are built, and write whether they are."""
    started = time.monotonic()
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    status = process.poll()
    fields = {"status": status, "waited_s": round(time.monotonic() - started, 2)}
    _end_group(process)
    file.append({"kind": "check", "stage": KERNELS, "name": "C kernels built", "ok": status == 0, "fields": fields})
    print(f"== {KERNELS}: {fields}; the compiler's output is in {KERNELS_LOG}", flush=True)
    return Outcome.PASSED if status == 0 else Outcome.FAILED


def _outcome(status: int) -> Outcome:
    return {0: Outcome.PASSED, CHECK_FAILED: Outcome.FAILED}.get(status, Outcome.CRASHED)


def _echo(output: IO[str] | None, tail: deque[str]) -> None:
    assert output is not None
    for line in output:
        sys.stdout.write(line)
        sys.stdout.flush()
        tail.append(line.rstrip("\n"))


def _end_group(process: subprocess.Popen[Any]) -> None:
    """End a stage's process, if it still runs, and all that is left of its process group."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
