"""Keeps a cluster's processes running on one machine.

`run` begins, in the foreground or in the background; `plan` says which processes, after `preflight` has looked at the
machine; `cluster` acts, and `child` has one process and decides when it is started again.
"""
