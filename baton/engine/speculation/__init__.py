"""Speculative decoding: drafts of the tokens to come, how many are worth computing, and their part in a step.

The scheduler takes `speculation.Speculation`; the rest is what that is made of. The runner says which drafts are right
(`baton.runner.execution.verification`).
"""
