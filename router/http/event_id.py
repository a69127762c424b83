"""The id of a server-sent event, with which a client continues a stream (`Last-Event-ID`).

The id is the client's position in each sequence of the request (`Chunk.next_position`), joined by dots: how many of its
tokens the client has, plus one if it has text that came without tokens. So any router can continue from an id alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from baton.errors import InvalidRequest
from baton.messages.request_limits import MAX_SEQUENCES

_PATTERN = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})*\Z")


def event_id(positions: Sequence[int]) -> str:
    """The id of the event after which a client has these positions."""
    return ".".join(map(str, positions))


def parse_event_id(text: str) -> list[int]:
    """The positions in a Last-Event-ID; raises InvalidRequest for an id that no event of ours has."""
    if not _PATTERN.match(text) or text.count(".") >= MAX_SEQUENCES:
        raise InvalidRequest("last-event-id", "is not the id of an event of a stream")
    return [int(number) for number in text.split(".")]
