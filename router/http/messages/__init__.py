"""Anthropic's API of messages: its bodies, answers, events and errors. Take the endpoints and `error_answer`."""
