"""The prefill node's half of a hand-off: leases, which say how long blocks stay and for whom."""
