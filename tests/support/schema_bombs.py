"""Small JSON schemas that take all memory and time if they are compiled without limits."""

from __future__ import annotations

import json


def schema_bomb(num_patterns: int = 28) -> str:
    """Return a schema. Each pattern doubles time and memory: 18 take 26 MB, 22 take 4 s, 28 exhaust any machine."""
    patterns = [{"type": "string", "pattern": f"^.*a.{{{number}}}$"} for number in range(1, num_patterns)]
    return json.dumps({"allOf": patterns})
