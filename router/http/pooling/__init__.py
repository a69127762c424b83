"""The endpoints that make vectors, labels and scores of texts, with their bodies."""
