"""Requests with several sequences: independent samples of one prompt, and beam search."""
