"""A simulated cluster in virtual time: real scheduler, block pool, placement and flights; step times are a formula.

Take `simulation.simulate` with a `config.SimulationConfig`, or `plan.run_plan` for several arrangements and rates. The
events of `events` stand for clock, timers and event loop of the others.
"""
