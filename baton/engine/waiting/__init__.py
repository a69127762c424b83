"""Requests that do not run: who comes first, who may begin with the room that there is, who gives way."""
