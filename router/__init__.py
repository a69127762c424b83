"""The router: admission, the view of the cluster, placement, flights, dispatching, and the fronts for clients."""
