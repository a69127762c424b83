"""Models: from a model directory to layers that run on Baton's operations and attend over the paged KV cache.

`checkpoint.py` checks a directory, `weights.py` loads it as a module of transformers, `recognition.py` and `layers.py`
replace the module's parts, and `transformer.py` computes steps, with the loop over the layers of `decoder.py` and
`loop/` where that is transformers' bit for bit. Weights that stay in their files until they are packed are in
`stored/`. Loaders take `load_model_for` and `Transformer`; routers and commands read `pooling_files.py` and
`checkpoint.py`, which need no torch.
"""
