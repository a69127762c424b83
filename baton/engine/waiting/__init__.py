"""Waiting requests: the queues' order, admission to free seats and blocks, and preemption of running requests."""
