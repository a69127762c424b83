"""What a process tells about itself: logs, metrics, spans, its event loop, and the line that says that it is ready."""
