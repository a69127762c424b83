"""`baton bench`: the command lines of the benchmarks; what they measure with is `baton.bench`."""
