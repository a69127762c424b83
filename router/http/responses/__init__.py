"""OpenAI's API of responses: bodies, objects, events, and the store. Take the endpoints and `ResponseStore`."""
