"""The thread that reads: it starts one-sided reads, watches them, digests what came, and gives up on stuck ones."""
