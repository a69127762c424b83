"""Attention to latents, one a token, in place of keys and values of all heads (multi-head latent attention)."""
