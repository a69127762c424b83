"""The OpenAI-compatible HTTP front of the router. No other folder of the router imports it."""
