"""Whether a grammar takes a text, decided byte by byte."""

from __future__ import annotations

from llguidance import LLTokenizer

from baton.text.constraints.schema_compiling import check_matcher, compile_constraint

_BYTES = LLTokenizer("byte", slices=LLTokenizer.json_slices())


def takes(grammar: str, text: str) -> bool:
    """Whether the text is an output of the grammar; raises InvalidRequest for what is no grammar."""
    matcher = compile_constraint(grammar, _BYTES, "grammar")
    for byte in text.encode():
        mask = matcher.compute_bitmask()
        check_matcher(matcher, "grammar")
        if not mask[byte // 8] >> byte % 8 & 1:
            return False
        matcher.consume_token(byte)
    matcher.compute_bitmask()
    return matcher.is_accepting()
