"""Processes that Baton starts: what ends them with whoever started them, what bounds them, and how they are forked."""
