"""The router's side for operators: drains and roles, events, explanations, metrics, the live page."""
