"""`baton bench serve`: a load generator of several processes for a Baton router or an OpenAI endpoint.

Take `run.run_load` with a `LoadPlan`, after `probe` has completed its `Target`; the rest is what its processes consist
of.
"""
