"""What an output must be: schemas, regular expressions, choices, grammars and structural tags, and their automata.

`grammar.py` makes matchers for a model, `schema_compiling.py` compiles and checks one constraint, `structural_tags.py`
and `lark_grammars.py` rewrite other notations in Lark's. Nothing here starts a process: untrusted constraints come from
`baton.text.constraint_checker`, which has a child process compile them first.
"""
