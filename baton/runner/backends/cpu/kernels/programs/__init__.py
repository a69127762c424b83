"""Programs: the operations of a step, recorded once and run in one call."""
