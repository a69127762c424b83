"""A cluster that is offered ten times its capacity: what is promised then, and the plot of what it did."""
