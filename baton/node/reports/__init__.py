"""What a node reports: its load and outputs to routers, its events and steps, its prefix cache, its metrics."""
