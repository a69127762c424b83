"""`baton bench compare`: arrangements of the same nodes on the same cores, under the same load."""
