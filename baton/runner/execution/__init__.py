"""The parts of a step: its input batch, sampling from its logits (masks, penalties, random numbers), embeddings."""
