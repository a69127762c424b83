"""The connection between two nodes: its messages and their codec, both ends, and whether the peer is alive."""
