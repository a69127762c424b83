"""What a model's runner computes with an adapter."""

from __future__ import annotations

from pathlib import Path

from baton.messages.sampling import SamplingParams
from baton.model_formats.adapters import open_adapter
from baton.runner.model_runner import TorchModelRunner
from tests.support.runner_driver import RunnerDriver

PROMPT = [5, 6, 7, 8, 9]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def load_adapter(runner: TorchModelRunner, directory: Path) -> str:
    """Load an adapter, and return its digest."""
    digest = open_adapter(directory).digest()
    runner.adapters.load(directory, digest)
    return digest


def outputs(runner: TorchModelRunner, *digests: str) -> list[list[int]]:
    """The tokens of requests with these adapters, which run together; "" is none."""
    driver = RunnerDriver(runner)
    for index, digest in enumerate(digests):
        driver.add(f"{index}", PROMPT, GREEDY, adapter=digest)
    driver.finish(chunk=3)
    return [request.output for request in driver.requests.values()]
