"""The process of a rank behind the first: `python -m baton.runner.ranks.rank_process RANK FILES CHANNEL SPEC`.

Only `RankGroup` starts it, with the descriptors that it shares.
"""

from __future__ import annotations

import signal
import socket
import sys

from baton.errors import BatonError
from baton.processes.interpreter import rare_collections
from baton.runner.lean_imports import import_transformers
from baton.runner.ranks.heartbeats import Heartbeats
from baton.runner.stage_spec import StageSpec

_FAULT = 1


def main(arguments: list[str]) -> int:
    """Follow the first rank until one is lost; returns the exit code."""
    rank, descriptors, channel_descriptor, spec = arguments
    channel = socket.socket(fileno=int(channel_descriptor))
    # What ends a whole group of processes lets the first rank drain: this one computes for it until its process ends.
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    heartbeats = Heartbeats(channel)
    # Imported only now, since torch and transformers take seconds.
    with rare_collections():
        import_transformers()
        from baton.runner.adapters.commands import AdapterServant
        from baton.runner.backends.cpu.kernels.errors import RankLost
        from baton.runner.backends.ranks.host_ranks import SharedFiles
        from baton.runner.ranks.rank import FollowingRank

    files = SharedFiles.of([int(descriptor) for descriptor in descriptors.split(",")])
    try:
        follower = FollowingRank(StageSpec.from_json(spec), int(rank), files)
        with rare_collections():
            follower.load()
        follower.follow(lambda adapters: heartbeats.loaded(AdapterServant(adapters, heartbeats.answer).take))
    except RankLost:
        return 0
    except BatonError as error:
        heartbeats.send(str(error).encode())
        return _FAULT
    except Exception as error:
        heartbeats.send(f"{type(error).__name__}: {error}".encode())
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
