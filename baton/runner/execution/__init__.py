"""What a step is made of and what is drawn from its logits: rows, masks, penalties, random numbers, embeddings."""
