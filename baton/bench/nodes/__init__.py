"""`baton bench nodes`: puts a load on a cluster and shows what each of its nodes was doing meanwhile.

The other experiments take `run.run_watched`, and the timelines of nodes.
"""
