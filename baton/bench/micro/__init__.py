"""Microbenchmarks of one part each (engine, scheduler, hand-off, router), with stand-ins for the parts around it."""
