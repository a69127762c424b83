"""The connection between two nodes: its messages and their codec, both ends, and the check whether the peer lives."""
