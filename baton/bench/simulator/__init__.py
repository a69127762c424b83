"""A simulated cluster in virtual time: real scheduler, block pool, placement and flights; step times are a formula."""
