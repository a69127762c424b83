"""Keeps a cluster's processes running on one machine. `restart` decides, `child` and `cluster` act."""
