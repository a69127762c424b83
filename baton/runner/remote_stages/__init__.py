"""Stages with KV caches of their own, in other processes on GPUs or on other hosts. The last stage leads the others.

Take `StageLeader` from here to lead them, and `StageWorker` to be one.
"""
