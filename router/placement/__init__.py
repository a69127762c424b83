"""Which nodes a request gets: the view of the cluster, the cost of each pair, the choice. See `placer.Placer`."""
