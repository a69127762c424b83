"""Which nodes a request gets: the view of the cluster, the cost of each pair, the choice. See `placer.Placer`.

`view` knows the nodes and `cache_view` their caches; `cost_model` and `placement` define the choice, and `cost_table`
computes the same for hundreds of nodes. Others take the view, the placer, and the values in `placement`.
"""
