"""The device that computes a model: the CPU or a GPU."""

from __future__ import annotations

import torch

from baton.errors import ConfigError

CPU = torch.device("cpu")


def resolve_device(name: str) -> torch.device:
    """The device by name; `auto` is the first GPU if there is one, otherwise the CPU.

    Raises ConfigError for a device that is unknown or that this machine does not have.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else CPU
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return CPU
    if device.type != "cuda":
        raise ConfigError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device {name!r} is not available: torch finds no GPU; install a CUDA build of torch, or use cpu"
        )
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name!r} is not available: this machine has {torch.cuda.device_count()} GPUs, counted from 0"
        )
    return torch.device("cuda", index)
