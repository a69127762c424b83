"""`baton bench compare`: compares arrangements of the same nodes on the same cores, under the same load."""
