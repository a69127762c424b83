"""The router's side for operators: drains and roles, adapters, events, explanations, metrics, the live page.

Only `router.process` uses it. Serving requests works without all of it.
"""
