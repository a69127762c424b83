"""Small JSON schemas that would take all memory and all time of whoever compiles them without limits."""

from __future__ import annotations

import json


def bomb(num_patterns: int = 28) -> str:
    """Each further pattern takes twice the time and the memory: 18 take 26 MB, 22 take 4 s, 28 take everything."""
    patterns = [{"type": "string", "pattern": f"^.*a.{{{number}}}$"} for number in range(1, num_patterns)]
    return json.dumps({"allOf": patterns})
