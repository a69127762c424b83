"""How adapters (LoRA) are named between roles: by the digest of their content. Names are for clients."""

from __future__ import annotations

import re

NO_ADAPTER = ""
"""The digest of a request that uses the base model alone."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


def is_adapter_digest(text: str) -> bool:
    """Whether a text can be the digest of an adapter."""
    return _DIGEST.fullmatch(text) is not None
