"""The stages of a model, each a process with its layers and their KV cache. The last stage leads the others.

Take `StageLeader` from here to lead them, and `StageWorker` to be one.
"""
