"""How a process is observed: logs, metrics, trace spans, the load of its event loop, and its announcement that it is
ready."""
