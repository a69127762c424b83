"""What a node tells: its description, its reports to routers, its events and steps, its prefix cache, its metrics."""
