"""Moving KV from a prefill node to a decode node: offers, leases, transfers, and what carries the bytes."""
