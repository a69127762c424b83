"""Tries how fast a process of this machine reads another's memory: `python -m kv_transfer.lane_trial`.

Prints one line: the kind of memory (that of a GPU, if there is one), bytes a second, and the lane, as far as UCX says.
Ends with 1 and a line `REASON ...` on the standard error if it can't.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace

from baton.errors import BatonError, ConfigError
from baton.runner.blocks.spare_memory import spare_memory
from kv_transfer.backends.base import PeerMemory, ReadState
from kv_transfer.backends.nixl import NixlBackend
from kv_transfer.backends.ucx_lanes import lane_of_reads
from kv_transfer.piece_plan import ReadRange

_BLOCKS, _BLOCK_BYTES = 16, 1 << 20
_READS = 4
"""The first one sets up the connection."""
_WITHIN_S = 20.0
_PUMP_S = 0.0005


def main() -> None:
    try:
        _offer() if sys.argv[1:] == ["offer"] else _read()
    except BatonError as error:
        sys.exit(f"REASON {error}")


def _offer() -> None:
    """Let the parent read, until it is gone."""
    memory = spare_memory(_BLOCKS, _BLOCK_BYTES)
    backend = NixlBackend("offering", memory)
    _say([backend.agent_metadata().hex(), memory.base_address, memory.device_id])
    until = time.monotonic() + 2 * _WITHIN_S
    while time.monotonic() < until:
        backend.pump()
        time.sleep(_PUMP_S)


def _read() -> None:
    memory = spare_memory(_BLOCKS, _BLOCK_BYTES)
    backend = NixlBackend("reading", memory)
    other = subprocess.Popen([sys.executable, "-P", "-m", __spec__.name, "offer"], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        line = other.stdout.readline()
        if not line:
            raise ConfigError("a second process can't offer memory")
        metadata, address, device = json.loads(line)
        peer = PeerMemory.of(memory, "offering", bytes.fromhex(metadata))
        backend.connect(replace(peer, base_address=address, device_id=device))
        seconds = min([_timed(backend) for _ in range(_READS)])
    finally:
        other.kill()
        other.wait()
    _say([memory.kind, _BLOCKS * _BLOCK_BYTES / seconds, lane_of_reads()])


def _timed(backend: NixlBackend) -> float:
    """The seconds of one read of all blocks. Raises ConfigError if it takes too long."""
    started = time.perf_counter()
    handle = backend.post_read("offering", [ReadRange(0, 0, _BLOCKS)])
    while backend.poll(handle) is not ReadState.DONE:
        if time.perf_counter() - started > _WITHIN_S:
            raise ConfigError(f"a read between two processes takes more than {_WITHIN_S:g} s")
    seconds = time.perf_counter() - started
    backend.release(handle)
    return seconds


def _say(values: list[object]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
