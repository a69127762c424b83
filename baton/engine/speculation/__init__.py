"""Speculative decoding: drafts of the tokens to come, how many are worth computing, and their part in a step."""
