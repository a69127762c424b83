"""The device that computes a model: the CPU or a GPU."""

from __future__ import annotations

import logging

import torch

from baton.errors import ConfigError
from baton.runner.gpu_facts import driver_version
from baton.runner.gpu_limits import why_driver_too_old

_log = logging.getLogger(__name__)

CPU = torch.device("cpu")


def resolve_device(name: str) -> torch.device:
    """The device by name; `auto` is the first GPU if there is one, otherwise the CPU.

    Raises ConfigError for a device that is unknown or that this machine does not have.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        if driver_version():
            _log.warning("the CPU computes, though this machine has a GPU: %s", why_no_gpu())
        return CPU
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return CPU
    if device.type != "cuda":
        raise ConfigError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} is not available: {why_no_gpu()}")
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name!r} is not available: this machine has {torch.cuda.device_count()} GPUs, counted from 0"
        )
    return torch.device("cuda", index)


def why_no_gpu() -> str:
    """Why torch computes on no GPU, and what to do; empty if it does."""
    if torch.cuda.is_available():
        return ""
    too_old = why_driver_too_old(driver_version(), torch.version.cuda or "")
    return too_old or "torch finds no GPU; install a CUDA build of torch, or use cpu"
