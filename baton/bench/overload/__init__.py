"""`baton bench overload`: a cluster is offered ten times its capacity; what is checked, and a plot of the run."""
