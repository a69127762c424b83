"""A request from its acceptance to its end: its attempts, the merged output, the text for its client, its record."""
