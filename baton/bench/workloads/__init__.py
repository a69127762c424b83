"""The requests of a benchmark and their arrival times: seeded, made lazily; only the readers of traces do I/O."""

from baton.bench.workloads.arrivals import Arrivals, GammaArrivals, RampArrivals, SteadyArrivals, UnpacedArrivals
from baton.bench.workloads.request import Piece, WorkloadRequest, piece_tokens, unique_piece
from baton.bench.workloads.workload import Lengths, Shape, Synthetic, Workload

__all__ = [
    "Arrivals",
    "GammaArrivals",
    "Lengths",
    "Piece",
    "RampArrivals",
    "Shape",
    "SteadyArrivals",
    "Synthetic",
    "UnpacedArrivals",
    "Workload",
    "WorkloadRequest",
    "piece_tokens",
    "unique_piece",
]
