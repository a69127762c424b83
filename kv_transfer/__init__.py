"""Moves KV blocks from one node to another, and decides when each side may reuse them.

`sender/` and `receiver/` decide, purely: leases and transfers. `link/` is the connection over which the two nodes
agree, `mover/` the threads that read, `backends/` how bytes are read. Beside them: what two nodes must agree on
(`layout`), which bytes a read moves (`piece_plan`), digests, the effects that both sides share, and metrics.
"""
