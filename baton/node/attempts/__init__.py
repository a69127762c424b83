"""The attempts that a node runs: whose they are, when their stages began, what is checked before one is taken."""
