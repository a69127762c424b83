"""Runs one model on several ranks: the processes beside the node's own, and the steps that it announces to them."""
