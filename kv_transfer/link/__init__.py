"""The connection between two nodes: its messages and their codec, both ends, and the check whether the peer lives.

Take `LinkClient` (decode node), `LinkServer` (prefill node) and the messages from here. The messages and `failures` are
pure, so that books may use them.
"""
