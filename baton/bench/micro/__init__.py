"""Benchmarks of one part each: engine, scheduler, hand-off, router; and what stands in for the parts around it."""
