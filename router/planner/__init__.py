"""The planner: how many nodes of each role the load needs, and the moves of nodes between roles. Pure.

`demand` says what arrives, `capacity` what nodes sustain, `law` decides, `moves` follows each move to its end, and
`planner` puts them together. A shell observes the cluster and carries out the effects: `baton.bench.simulator.planner`.
"""
