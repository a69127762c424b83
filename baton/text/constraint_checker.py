"""Checks untrusted constraints of an output (JSON schemas, regular expressions, choices, grammars) in child processes.

The rules:

1. A constraint is compiled in this process only after a child has compiled it (`check`), within `WorkLimits`.
2. The verdict on a constraint is cached by its digest, so that checking it again costs nothing.
3. A refusal that may be caused by this machine and not by the constraint (the wall clock limit) is not cached.
"""

from __future__ import annotations

import hashlib
import threading

from cachetools import LRUCache

from baton.errors import InvalidRequest
from baton.messages.sampling import ConstraintKind
from baton.text.bounded_workers import BoundedWorkers
from baton.text.constraints.json_schemas import MAX_SCHEMA_BYTES
from baton.text.constraints.schema_compiling import MAX_CHOICE_JSON_BYTES

_MAX_VERDICTS = 1024


class ConstraintChecker:
    """Checks constraints in child processes. Methods may be called from any thread; `check` blocks the calling one."""

    def __init__(self, workers: BoundedWorkers | None = None) -> None:
        """`workers`: the child processes, which are closed with this checker."""
        self._workers = workers or BoundedWorkers()
        self._lock = threading.Lock()
        self._verdicts: LRUCache[bytes, str] = LRUCache(_MAX_VERDICTS)
        """By a constraint's digest: why it can't be served, or an empty text."""

    def check_known(self, text: str, kind: ConstraintKind = "json_schema") -> bool:
        """Whether the cache says that a constraint can be served; raises InvalidRequest if it says that it can't."""
        digest = _digest(text, kind)
        with self._lock:
            reason = self._verdicts.get(digest)
        if reason:
            raise InvalidRequest(kind, reason)
        return reason is not None

    def check(self, text: str, kind: ConstraintKind = "json_schema") -> None:
        """Check a constraint; raises InvalidRequest if it can't be served, Overloaded if no child can be started."""
        if self.check_known(text, kind):
            return
        outcome = self._workers.run(kind, text)
        if outcome.is_lasting:
            digest = _digest(text, kind)
            with self._lock:
                self._verdicts[digest] = outcome.reason
        if outcome.reason:
            raise InvalidRequest(kind, outcome.reason)

    def close(self) -> None:
        """End the child processes, even while they compile. Idempotent."""
        self._workers.close()


def _digest(text: str, kind: ConstraintKind) -> bytes:
    """The digest under which a constraint's verdict is cached.

    Raises InvalidRequest for a constraint that is too long or is not valid UTF-8.
    """
    try:
        content = text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(kind, "is not valid UTF-8") from None
    most = MAX_CHOICE_JSON_BYTES if kind == "choice" else MAX_SCHEMA_BYTES
    if len(content) > most:
        raise InvalidRequest(kind, f"has {len(content)} bytes; at most {most} are taken")
    return hashlib.sha256(kind.encode() + content).digest()
