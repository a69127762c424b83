"""`baton bench compare`: compares arrangements of the same nodes on the same cores, under the same load.

`run` starts everything and tunes the steps, `interleaved` runs the loads in turn, `verdict` decides, `report` writes.
"""
