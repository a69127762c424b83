"""The answer to a request, collected from its stream, and how it was served in one line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from baton.cli.output import size
from baton.errors import BatonError
from baton.messages.generation import Chunk, Finished, GenerateEvent, SequenceFinished


@dataclass(slots=True)
class Choice:
    """One generated sequence."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"text": self.text, "token_ids": self.token_ids, "finish_reason": self.finish_reason}


@dataclass(slots=True)
class Answer:
    """The answer to a request, collected from its stream of events."""

    choices: list[Choice] = field(default_factory=lambda: [Choice()])
    finished: Finished | None = None

    def add(self, event: GenerateEvent) -> str:
        """Add an event, and return the text that it brings."""
        if isinstance(event, Finished):
            self.finished = event
            self.choices[0].finish_reason = event.finish_reason
        elif isinstance(event, SequenceFinished):
            self._choice(event.sequence_index).finish_reason = event.finish_reason
        elif isinstance(event, Chunk):
            choice = self._choice(event.sequence_index)
            choice.text += event.text
            choice.token_ids += event.token_ids
            return event.text
        return ""

    def _choice(self, index: int) -> Choice:
        while len(self.choices) <= index:
            self.choices.append(Choice())
        return self.choices[index]

    @property
    def text(self) -> str:
        """The generated text. Several sequences are numbered, one below the other."""
        if len(self.choices) == 1:
            return self.choices[0].text
        count = len(self.choices)
        parts = [f"[{number}/{count}] {choice.text}" for number, choice in enumerate(self.choices, 1)]
        return "\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The answer as a JSON object. Raises BatonError if the last event of the stream is missing."""
        end = self.finished
        if end is None:
            raise BatonError("the stream ended before the end of the request")
        if len(self.choices) == 1:
            output = self.choices[0].to_json()
        else:
            output = {"choices": [{"index": i, **choice.to_json()} for i, choice in enumerate(self.choices)]}
        return output | {
            "usage": {
                "prompt_tokens": end.prompt_tokens,
                "completion_tokens": end.completion_tokens,
                "cached_tokens": end.cached_tokens,
                "draft_tokens": end.draft_counts.num_drafted,
                "accepted_draft_tokens": end.draft_counts.num_accepted,
            },
            "path": {
                "prefill_node": end.path.prefill_node,
                "decode_node": end.path.decode_node,
                "attempts": end.path.attempts,
                "reason": end.path.reason,
            },
            "timings": {
                "queue_ms": end.queue_ms,
                "prefill_ms": end.prefill_ms,
                "transfer_ms": end.transfer_ms,
                "ttft_ms": end.ttft_ms,
                "total_ms": end.total_ms,
            },
            "kv_bytes": end.kv_bytes,
            "bit_exact": end.bit_exact,
        }


def summary(end: Finished) -> str:
    """How a request was served, in one line."""
    path = end.path
    nodes = f"{path.prefill_node} → {path.decode_node}" if path.prefill_node else path.decode_node
    moved = f", {size(end.kv_bytes)} of KV in {end.transfer_ms:.1f} ms" if path.prefill_node else ""
    bits = ", not bit-exact" if end.bit_exact is False else ""
    return (
        f"[{nodes}{moved}; {end.prompt_tokens} + {end.completion_tokens} tokens, "
        f"first after {end.ttft_ms:.0f} ms, {tokens_per_second(end):.0f} tokens/s, {end.finish_reason}{bits}]"
    )


def tokens_per_second(end: Finished) -> float:
    """Decode rate: tokens after the first, divided by the time after the first."""
    seconds = (end.total_ms - end.ttft_ms) / 1e3
    return (end.completion_tokens - 1) / seconds if seconds > 0 and end.completion_tokens > 1 else 0.0
