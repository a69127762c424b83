"""Profiles steps of a runner by torch's profiler: the longest kernels, and how many a step starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

_STARTS = frozenset({"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"})
_GRAPH_STARTS = "cudaGraphLaunch"
_TOP = 12
_NAME_CHARS = 90


def profiled(step: Callable[[], object], count: int, device: torch.device) -> dict[str, Any]:
    """Run `count` steps under torch's profiler; the result's numbers are of one step, times in milliseconds.

    On a CPU the kernels are torch's operators.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_gpu = device.type == "cuda"
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    started = time.perf_counter()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(count):
            step()
    wall_ms = (time.perf_counter() - started) * 1e3 / count
    averages: list[Any] = list(profile.key_averages())
    spent = {
        id(event): (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3 for event in averages
    }
    # What was started on the host has the time of its kernels, too, under another name.
    kernels = [event for event in averages if not on_gpu or str(event.device_type).endswith("CUDA")]
    kernels.sort(key=lambda event: spent[id(event)], reverse=True)
    calls = {event.key: event.count for event in averages}
    return {
        "wall_ms_with_profiler": wall_ms,
        "kernels_ms": sum(spent[id(event)] for event in kernels) / count,
        "kernels": sum(event.count for event in kernels) / count,
        "launches": sum(calls.get(name, 0) for name in _STARTS) / count,
        "graph_launches": calls.get(_GRAPH_STARTS, 0) / count,
        "copies": calls.get("cudaMemcpyAsync", 0) / count,
        "top": [
            {"name": event.key[:_NAME_CHARS], "ms": spent[id(event)] / count, "calls": event.count / count}
            for event in kernels[:_TOP]
        ],
    }
