"""What a process tells about itself: logs, and the one line that says it is ready."""
