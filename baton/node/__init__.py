"""The process of a node, whatever its role: its lifecycle, the engine's thread, and the streams of routers.

A role's program takes `process.run_node` and implements `role.NodeRole`.
"""
