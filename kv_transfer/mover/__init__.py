"""The thread that reads: it posts one-sided reads, polls them, computes digests, and follows reads that are stuck."""
