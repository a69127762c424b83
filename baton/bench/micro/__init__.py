"""Microbenchmarks of one part each, with stand-ins for the parts around it.

`engine`, with `adapters`, `ranks` and `speculation` as variants, drives one engine (`engine_drive`) and knows what
work its model has (`engine_work`); `scheduler` has no model at all; `handoff` compares with `bare_reads`; `router` has
a real router between the `relay_` nodes and clients. `shapes` writes models with random weights.
"""
