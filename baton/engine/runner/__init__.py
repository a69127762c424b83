"""Executes what the scheduler decided. The only home of torch and transformers; importing this package loads neither."""
