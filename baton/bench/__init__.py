"""Benchmarks: live harness, simulator, reports."""
