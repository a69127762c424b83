"""OpenAI's API of responses: bodies, objects, events, and the store. Take `ResponsesEndpoint`, `stored_routes` and
`ResponseStore`."""
