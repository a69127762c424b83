"""Adapters (LoRA) of a loaded model: their files checked against it, their memory, and the rows that have one.

`AdaptableProduct` stands in the model's parts for every product that an adapter may change; `ModelAdapters` knows all
of them, and the adapters that are loaded.
"""
