"""The attempts that a node runs: which router owns them, how long their stages took, and the checks of new ones."""
