"""`baton bench`: the command lines of the benchmarks in `baton.bench`."""
