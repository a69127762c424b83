"""The requests of a benchmark and their arrival times: seeded, made lazily; only the readers of traces do I/O.

`spec` names a workload by plain values and builds it; `workload` has what all kinds of workloads are made of.
"""
