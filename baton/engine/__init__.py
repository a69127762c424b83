"""The engine: scheduler, KV cache, requests. It decides what each step computes; a `ModelRunner` computes it."""
