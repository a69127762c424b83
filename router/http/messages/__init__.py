"""Anthropic's API of messages: its bodies, answers and events. Take the endpoints."""
