"""How a receiver reads blocks from a sender's memory: the interface, and NIXL behind it."""
