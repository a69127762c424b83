"""Text and token ids: tokenizer, detokenizer, chat templates, prompts, ends of texts, tool calls, constraints.

Routers take `tokenizer.Tokenizer` and `model_template.ModelTemplate`, nodes `constraints.grammar.Grammars`. What a
stranger may have written is worked on in child processes (`bounded_workers.py`). Needs no torch.
"""
