"""Stages with memories of their own, in other processes on GPUs or on other hosts, which the first stage leads.

Take `FirstStage` from here to lead them, and `StageWorker` to be one.
"""
