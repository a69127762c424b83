"""Mixtures of experts: their packed weights, and their routers, described by data about what a router computes."""
