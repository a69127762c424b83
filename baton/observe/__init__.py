"""How a process is observed: logs, metrics, traces, the load of its event loop, and the word that it is ready.

Every process may take from it; it knows nothing of engines, routers or nodes but their reports. OpenTelemetry is
imported only where traces are asked for (`start_tracing`).
"""
