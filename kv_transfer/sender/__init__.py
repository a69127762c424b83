"""The prefill node's half of a hand-off: leases, which say how long blocks stay and for whom, and probes of known
bytes.

Take `LeaseBook` and `ProbeOffers` from here, and from `lease_values` what they are given and answer. All of it is pure.
"""
