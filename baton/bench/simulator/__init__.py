"""The cluster in virtual time: the real scheduler, block pool, placement and flights; computing is a formula."""
