"""Benchmarks: load generator for live clusters, microbenchmarks, simulator, reports."""
