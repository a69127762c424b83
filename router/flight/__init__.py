"""A request from its acceptance to its one end: attempts, merged outputs, the text that is sent, its record."""
