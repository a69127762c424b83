"""Text and token ids: tokenizer, detokenizer, chat template, stop strings, grammars. Needs no torch."""
