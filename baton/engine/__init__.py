"""The engine: scheduler, block pool, requests. Pure decisions; `runner` is the only part that computes tensors."""
