"""Text of others on a terminal: what a model writes, what it is called, what a server says, what is in a log.

A terminal obeys control characters: a sequence of them clears it, sets its title, fills the clipboard, or writes over
what stands there. Those for the direction of writing show a text that is another one.
"""

from __future__ import annotations

_OBEYED = [
    *(code for code in range(0x20) if chr(code) not in "\n\t"),
    *range(0x7F, 0xA0),
    *(0x061C, 0x200E, 0x200F),  # marks of direction
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
]
"""C0 without line feed and tabulator, DEL, C1, and Unicode's controls of the direction of writing (UAX 9)."""
_ESCAPED = {code: f"\\u{code:04x}" for code in _OBEYED}
_REPLACED = dict.fromkeys(_OBEYED, "\ufffd")


def shown(text: str) -> str:
    """The text with an escape such as `\\u001b` for each character that a terminal would obey.

    JSON, and texts in double quotes in YAML, mean the same afterwards.
    """
    return text if text.isascii() and text.isprintable() else text.translate(_ESCAPED)


def shown_in_place(text: str) -> str:
    """The text with one other character for each that a terminal would obey, so that its width stays."""
    return text.translate(_REPLACED)
