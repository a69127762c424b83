"""The threads that read: they start the transfer agent's reads, watch them, and digest what was read.

Take `parts_mover.mover_of_node` from here, which is the mover of all parts of a node, and its events from `part_mover`.
A part of the KV cache that belongs to another process of the node has its mover there: `mover_server` runs it, and
`remote_mover` is the node's end of the stream to it.
"""
