"""The HTTP front of the router: OpenAI's and Anthropic's APIs, pages for browsers, health and metrics.

`server` and `connection` take a request and hand it to the application (`app`), which has a route for each endpoint. An
endpoint reads the JSON (`json_body`), checks it as a body (`bodies/`, `messages/`, `responses/`), makes requests to the
core of it, and makes an answer of the core's events (`answers`, `events`). The core is what serves requests of any API,
HTTP or gRPC: `endpoints.Handler` is its interface, `router.front.GenerationHandler` the real one. No other folder of
the router imports this one.
"""
