"""The hand-off of KV from a prefill node to a decode node: offers, leases, transfers, and the reads of the bytes."""
