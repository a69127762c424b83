"""Layers that keep a state in place of keys and values: what they ask for, and who computes it."""
