"""The engine: scheduler, block pool, requests. Pure decisions; `runner` is what it asks of whoever computes tensors."""
