"""What operators do with a router and see of it: drains and roles, events, explanations, metrics, the live page."""
