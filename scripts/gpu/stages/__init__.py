"""The stages of `scripts/gpu_check`, one a module: `SECONDS` is a stage's deadline, and `run(context)` runs it."""
