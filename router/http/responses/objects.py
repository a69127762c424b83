"""Makes the response object of OpenAI's API, at every stage of a response."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.messages.generation import Finished


@dataclass(frozen=True, slots=True)
class ResponseDraft:
    """What is known of a response before its items.

    Its methods write JSON, since the items have log-probabilities, which are written piece by piece: a million numbers
    at once would hold the event loop.
    """

    id: str
    created_at: int
    """Seconds since the epoch."""
    model: str
    echoed: Mapping[str, Any]
    """Fields that repeat the request's."""
    has_logprobs: bool

    def in_progress(self) -> str:
        """The response before its end."""
        return self._object("in_progress")

    def failed(self, message: str) -> str:
        """The response of a request that failed."""
        return self._object("failed", error={"code": "server_error", "message": message})

    def ended(self, output: str, finish_reason: str, finished: Finished, num_reasoning_tokens: int, now: float) -> str:
        """The response at its end, complete or cut by its length.

        `output`: its items in JSON, separated by commas. `now`: seconds since the epoch.
        """
        status, usage = status_of(finish_reason), _usage(finished, num_reasoning_tokens)
        if status == "incomplete":
            return self._object(status, output, usage=usage, incomplete_details={"reason": "max_output_tokens"})
        return self._object(status, output, usage=usage, completed_at=int(now))

    def _object(self, status: str, output: str = "", **more: object) -> str:
        """The response with this status; `output`: its items, `more`: fields that are not null."""
        fields = {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "usage": None,
            **self.echoed,
            **more,
        }
        return f'{as_text(fields)[:-1]},"output":[{output}]}}'


def status_of(finish_reason: str) -> str:
    """The status of a response that ended well."""
    return "incomplete" if finish_reason == "length" else "completed"


def as_text(found: Mapping[str, Any]) -> str:
    """An object as JSON, which may have text that is not valid Unicode."""
    return json.dumps(found, ensure_ascii=False, separators=(",", ":"))


def _usage(finished: Finished, num_reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": finished.prompt_tokens,
        "input_tokens_details": {"cached_tokens": finished.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": finished.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
    }
