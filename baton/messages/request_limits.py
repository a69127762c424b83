"""How much a client's request may have of everything: counts and lengths, looked at before anything is done with them.

`router.admission.validation` says what values may be; `router.http` and `baton.wire` refuse what is too much before
they take it apart. docs/security.md shows the same numbers.
"""

from __future__ import annotations

MAX_REQUEST_BYTES = 1 << 20
"""The largest gRPC request and HTTP body, in bytes."""
MAX_PROMPT_BYTES = 1 << 20
MAX_TOKEN_IDS = 1 << 18
"""In one list: of a prompt, to be turned into text, or that a text came to. A model's own length comes on top."""
MAX_PROMPTS = 32
"""The most prompts of one call for completions."""
MAX_INPUTS = 256
"""The most inputs of one call for embeddings."""
MAX_MESSAGES = 4096
"""The most messages of one chat."""
MAX_TEMPLATE_VARIABLES = 64
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20
MAX_SALT_BYTES = 256
MAX_POSITIONS = 8
"""Sequences of a stream that goes on."""

MAX_BODY_FIELDS = 128
"""Keys of a body's own object."""
MAX_BODY_DEPTH = 64
MAX_BODY_CONTAINERS = 1 << 14
"""Objects and arrays in a body."""
MAX_BODY_STRINGS = 1 << 16
MAX_BODY_VALUES = 1 << 18
"""Commas outside strings: what a body has of values, nearly."""
