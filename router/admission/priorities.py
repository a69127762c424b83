"""Which priorities a client may ask for.

Waiting makes up for priority slowly, by default 60 s for one step, so a client that could ask for any number would keep
all others waiting for as long as it likes. So by default a client may place its requests behind those without a
priority, and not before them.
"""

from __future__ import annotations

from dataclasses import replace

from baton.errors import InvalidRequest
from baton.messages.generation import GenerateRequest
from baton.messages.request_limits import MAX_PRIORITY


def with_allowed_priority(raw: GenerateRequest, min_priority: int) -> GenerateRequest:
    """The request with the priority that it gets. Raises InvalidRequest for one that its caller may not ask for.

    `min_priority`: the smallest one where the caller's key has no bound of its own. A request without a priority gets
    the smallest that is allowed if 0 is not.
    """
    least, whose = min_priority, "of this router"
    if raw.min_priority is not None:
        least, whose = raw.min_priority, "of this API key"
    if least <= raw.priority <= MAX_PRIORITY:
        return raw
    if raw.priority == 0:
        return replace(raw, priority=least)
    why = f"must be {least} to {MAX_PRIORITY}, the range {whose}, not {raw.priority}; the smallest numbers come first"
    raise InvalidRequest("priority", why)
