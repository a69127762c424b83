"""Text and token ids: tokenizer, detokenizer, stop strings, grammars. Needs no torch and no transformers."""
