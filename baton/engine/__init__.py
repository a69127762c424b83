"""The engine: scheduler, KV cache, requests. It decides what each step computes; a `ModelRunner` computes it.

Whoever runs an engine takes `core.EngineCore` with `scheduler.Scheduler`, puts in `request.Request`s, and gets
`batch.EngineCoreOutput`s. `runner.py` and `connector.py` are the interfaces to what computes and to what moves KV.
"""
