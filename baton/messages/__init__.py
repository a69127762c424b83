"""The messages between clients, routers and nodes, as plain values; `baton.wire` turns them into bytes.

`generation` and `pooling` are what clients say and hear, `node` what routers and nodes do, `operator` and `node_report`
what operators are told. The other modules are parts of these: names (`ids`), parameters of sampling and drafts, what a
model can do, adapters, rows in place of tokens (`spans`, `prompt_rows`), packed log-probabilities, the KV cache's
changes, and the bounds of a request. Every folder may import all of them.
"""
