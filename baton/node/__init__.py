"""The process of a node, whatever its role: its lifecycle, the engine's thread, and the streams of routers."""
