"""Models: from a model directory to layers that run on Baton's operations and attend over the paged KV cache."""
