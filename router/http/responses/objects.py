"""Makes the response object of OpenAI's API, at every stage of a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.messages.generation import Finished


@dataclass(frozen=True, slots=True)
class ResponseDraft:
    """What is known of a response before its text."""

    id: str
    item_id: str
    """The id of its message."""
    created_at: int
    """Seconds since the epoch."""
    model: str
    echoed: Mapping[str, Any]
    """Fields that repeat the request's."""
    has_logprobs: bool

    def in_progress(self) -> dict[str, Any]:
        """The response before its end."""
        return self._object("in_progress", [])

    def failed(self, message: str) -> dict[str, Any]:
        """The response of a request that failed."""
        return self._object("failed", []) | {"error": {"code": "server_error", "message": message}}

    def ended(
        self, text: str, logprobs: Sequence[Any], finish_reason: str, finished: Finished, now: float
    ) -> dict[str, Any]:
        """The response at its end, complete or cut by its length. `now`: seconds since the epoch."""
        is_cut = finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        found = self._object(status, [self.message(status, [self.part(text, logprobs)])])
        found["usage"] = _usage(finished)
        if is_cut:
            return found | {"incomplete_details": {"reason": "max_output_tokens"}}
        return found | {"completed_at": int(now)}

    def message(self, status: str, content: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The response's message, its one item."""
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def part(self, text: str, logprobs: Sequence[Any]) -> dict[str, Any]:
        """The text of the message, its one part."""
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _object(self, status: str, output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": output,
            "usage": None,
            **self.echoed,
        }


def _usage(finished: Finished) -> dict[str, Any]:
    return {
        "input_tokens": finished.prompt_tokens,
        "input_tokens_details": {"cached_tokens": finished.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": finished.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
    }
