"""The requests of a benchmark and their arrival times: seeded, made lazily; only the readers of traces do I/O."""

from baton.bench.workloads.workload import (
    Arrivals,
    GammaArrivals,
    Lengths,
    Piece,
    RampArrivals,
    Shape,
    SteadyArrivals,
    Synthetic,
    UnpacedArrivals,
    Workload,
    WorkloadRequest,
    piece_tokens,
    unique_piece,
)

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
