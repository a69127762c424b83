"""Text and token ids: tokenizer, detokenizer, chat template, stop strings, loops, grammars. Needs no torch."""
