"""Ways to move bytes: NIXL, and an in-process fake beside it."""
