"""What makes a node a prefill node: it offers the blocks it computed."""
