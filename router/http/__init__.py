"""The HTTP front of the router: OpenAI's and Anthropic's APIs, pages for browsers, health and metrics.

`server` and `connection` take a request and hand it to the application (`app`), which has a route for each endpoint. An
API is a folder: `completions` (with chats), `responses`, `messages`, `pooling`, `audio`; each reads the JSON
(`json_body`), checks it as a body (`bodies` has what all bodies share), makes requests to the core of it, and makes an
answer of the core's events (`endpoint`, `generating`, `answers`, `answer_items`). The core is what serves requests of
any API, HTTP or gRPC: `router.handler.Handler` is its interface, `router.front.GenerationHandler` the real one.
`pages` has what is only read. No other folder of the router imports this one.
"""
