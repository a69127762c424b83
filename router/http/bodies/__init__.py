"""The bodies that clients may send to the endpoints of OpenAI's API for text and embeddings."""
