"""`baton bench validate`: compares the simulator with real processes that get the same requests at the same times.

`run` measures, `fit` and `predict` make a simulation of what was measured at other loads, `report` compares.
"""
