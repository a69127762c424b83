"""`baton bench nodes`: a load on a cluster, and what each of its nodes was doing meanwhile."""
