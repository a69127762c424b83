"""Parts of layers on Baton's operations, each in the place of a transformers module that computes the same."""
