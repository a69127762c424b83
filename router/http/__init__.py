"""The OpenAI-compatible front: HTTP in and out, the router's core behind. Nothing below knows of it."""
