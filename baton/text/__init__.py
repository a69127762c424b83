"""Text and token ids: the tokenizer, incremental detokenizing, stop strings. No torch, no transformers."""
