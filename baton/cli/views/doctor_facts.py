"""Gathers the facts that the doctor checks. What could crash or hang is tried in a process of its own."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import baton
from baton.bench.results.host import available_memory, usable_cores
from baton.cli.cluster.run_dir import default_run_dir
from baton.cli.views.doctor_checks import Facts, GpusFacts, LaneFacts, ModelFacts
from baton.config import NodeConfig, UpConfig
from baton.config.setting import settings_of
from baton.errors import BatonError, ConfigError
from baton.messages.node import bits_of
from baton.messages.node_model import ONE_RANK, NodeShape
from baton.models.resolve import FoundModel

if TYPE_CHECKING:
    from baton.registry.connection import ServerMemory

_DEFAULTS = UpConfig.model_validate({})
_PORTS = {"--grpc-port": _DEFAULTS.grpc_port, "--http-port": _DEFAULTS.http_port}
_CHECK_BLOCKS = 64
"""Size of the KV cache with which the model is loaded: enough for its check at start."""
_NIXL_S = 60.0


def gather_facts(
    found_model: FoundModel,
    dtype: str,
    registry: str = "",
    run_dir: Path | None = None,
    shape: NodeShape = ONE_RANK,
) -> Facts:
    """Gather all facts. Never raises for what it finds. `run_dir`: a cluster's; None: the one of this user. `shape`:
    that of each node that will be started."""
    from baton.runner.backends.cpu import kernels
    from baton.runner.model.weights import resolve_dtype

    nixl_reason, lane = _tried_nixl()
    kernel_names = kernels.available()
    cores = usable_cores()
    nodes = _DEFAULTS.prefill + _DEFAULTS.decode
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    run_dir, installation = (run_dir or default_run_dir(os.environ)).absolute(), Path(baton.__file__).parent
    return Facts(
        kernel_path=kernel_names.isa,
        kernel_paths=kernel_names.isas,
        kernel_reason=kernel_names.reason,
        compiler=next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), ""),
        native_bfloat16=resolve_dtype("auto") == "bfloat16",
        model=model_facts(found_model, dtype, _DEFAULTS.threads_per_node(cores)),
        cores=cores,
        nodes=nodes,
        threads_per_node=_DEFAULTS.threads_per_node(cores),
        shape=shape,
        redis_server=_redis_server(),
        nixl_reason=nixl_reason,
        lane=lane,
        ucx_tls=os.environ.get("UCX_TLS", ""),
        available_memory=available_memory(),
        kv_cache_bytes=int(_DEFAULTS.kv_cache_memory),
        shm_free=_free(Path("/dev/shm")),
        memlock=None if memlock == resource.RLIM_INFINITY else memlock,
        rdma_devices=_names(Path("/sys/class/infiniband")),
        ports=_PORTS,
        ports_in_use=frozenset(port for port in _PORTS.values() if not _is_free(port)),
        run_dir=str(run_dir),
        disk_free=_free(next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())),
        seconds_since_installed=time.time() - max(file.stat().st_mtime for file in installation.iterdir()),
        clock_is_synchronised=_clock_is_synchronised(),
        version=baton.__version__,
        unmet=_unmet(),
        registry=_registry(registry) if registry else None,
        gpus=_gpus(),
    )


def _gpus() -> GpusFacts:
    from baton.runner.backends.device import why_no_gpu
    from baton.runner.gpu_facts import driver_version, gpus_here

    marks = ((setting.key, setting.on_gpu) for setting in settings_of(NodeConfig).values())
    return GpusFacts(
        [(gpu.name, gpu.free_bytes, gpu.total_bytes) for gpu in gpus_here().values()],
        driver_version(),
        why_no_gpu(),
        ", ".join(f"{key} {mark.text}" for key, mark in marks if mark is not None),
    )


def model_facts(model: FoundModel, dtype: str, threads: int) -> ModelFacts:
    """Load the model once, with a small KV cache, and say what became of it. Never raises a BatonError."""
    from baton.bench.micro.engine_work import read_work
    from baton.runner import TorchSpec, load
    from baton.runner.model.checkpoint import open_checkpoint
    from baton.runner.model.weights import resolve_dtype

    directory, name = model.directory, model.name
    try:
        weight_bytes = read_work(directory).multiplied * (2 if resolve_dtype(dtype) == "bfloat16" else 4)
        if not model.dequantize:
            # Packed weights are about as large as their files.
            files = open_checkpoint(directory).weight_files
            weight_bytes = min(weight_bytes, sum(file.stat().st_size for file in files))
        free = available_memory()
        if free and weight_bytes > free:
            return ModelFacts(name, f"{name} has {weight_bytes >> 20} MiB of weights, {free >> 20} MiB are available")
        spec = TorchSpec(
            directory,
            dtype,
            num_blocks=_CHECK_BLOCKS,
            num_threads=threads,
            name=name,
            dequantize=model.dequantize,
        )
        info = load(spec).model
    except BatonError as error:
        return ModelFacts(name, " ".join(str(error).split()))
    paths = [(path.part, path.runs, path.why_not_faster) for path in info.compute_paths]
    return ModelFacts(
        name,
        "",
        info.dtype,
        info.numerics,
        info.bit_exact,
        info.bit_exact_reason,
        info.weight_bytes,
        paths,
        _template_error(directory),
        bits_of(info.fingerprint, info.dtype, info.numerics, info.bit_exact),
    )


def _template_error(directory: Path) -> str:
    from baton.text.model_template import ModelTemplate

    try:
        with closing(ModelTemplate.load(directory)) as template:
            return template.check()
    except ConfigError as error:
        return str(error)


def _registry(url: str) -> ServerMemory:
    from baton.registry.connection import ServerMemory, server_memory

    try:
        return asyncio.run(server_memory(url))
    except ConfigError as error:
        return ServerMemory(error=str(error))


def _redis_server() -> str:
    """The path of the program, or empty."""
    from baton.registry.embedded import find_redis_server

    try:
        return str(find_redis_server())
    except ConfigError:
        return ""


def _tried_nixl() -> tuple[str, LaneFacts | None]:
    """Why NIXL does not work, or else what a read between two processes takes."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kv_transfer.lane_trial"],
            capture_output=True,
            text=True,
            timeout=_NIXL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it did not start within {_NIXL_S:.0f} s", None
    if done.returncode == 0:
        return "", LaneFacts(*json.loads(done.stdout.strip().splitlines()[-1]))
    lines = done.stderr.strip().splitlines()
    reasons = [line.removeprefix("REASON ") for line in lines if line.startswith("REASON ")] or lines
    return (reasons[-1] if reasons else f"it ended with {done.returncode}"), None


def _free(path: Path) -> int | None:
    try:
        room = os.statvfs(path)
    except OSError:
        return None
    return room.f_bavail * room.f_frsize


class _Timex(ctypes.Structure):
    """The first fields of Linux's `struct timex` (adjtimex(2)), and space for the others."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        *((name, ctypes.c_long) for name in ("offset", "freq", "maxerror", "esterror")),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


_UNSYNCHRONISED = 0x40


def _clock_is_synchronised() -> bool:
    clock = _Timex()
    try:
        state: int = ctypes.CDLL(None).adjtimex(ctypes.byref(clock))
    except (OSError, AttributeError):
        return False
    return state >= 0 and not clock.status & _UNSYNCHRONISED


def _unmet(distribution: str = "baton-serve") -> Sequence[str]:
    """Requirements that are not met, such as `torch>=2.13 (2.10.0 is installed)`."""
    from packaging.requirements import Requirement

    unmet = []
    for line in metadata.requires(distribution) or ():
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            here = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            unmet.append(f"{wanted.name}{wanted.specifier} (not installed)")
            continue
        if not wanted.specifier.contains(here, prereleases=True):
            unmet.append(f"{wanted.name}{wanted.specifier} ({here} is installed)")
    return unmet


def _names(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(entry.name for entry in folder.iterdir()))
    except OSError:
        return ()


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
