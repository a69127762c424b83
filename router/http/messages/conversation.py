"""Turns a conversation of Anthropic's API into messages as a chat template gets them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.errors import InvalidRequest
from baton.messages.request_limits import MAX_MESSAGES, MAX_TOOLS
from router.http.messages.blocks import Block, Thinking, ToolResult, ToolUse, text_of


class Turn(Protocol):
    """One message, as a client sends it."""

    @property
    def role(self) -> str: ...

    @property
    def content(self) -> Sequence[Block]: ...


@dataclass(slots=True)
class _Message:
    """A message for the template, which may be of several turns."""

    role: str
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolUse] = field(default_factory=list)
    call_id: str | None = None
    """The call whose result the message is."""

    def add(self, later: _Message) -> None:
        """Add a message of the same role that follows."""
        self.texts += later.texts
        self.reasoning += later.reasoning
        self.calls += later.calls

    def as_message(self) -> dict[str, Any]:
        """The message, with the fields that it has."""
        message: dict[str, Any] = {"role": self.role, "content": "\n".join(filter(None, self.texts))}
        if reasoning := "\n".join(filter(None, self.reasoning)):
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
                for call in self.calls
            ]
        if self.call_id is not None:
            message["tool_call_id"] = self.call_id
        return message


def template_messages(system: str, turns: Sequence[Turn]) -> Sequence[dict[str, Any]]:
    """The messages for the model's template; raises InvalidRequest for more than a chat may have, and for the result of
    a call that is not before it.

    Messages of the same role that follow each other are one, as in Anthropic's API: many templates want the roles to
    alternate. Each result of a call is a message of its own, of the role `tool`.
    """
    found = [_Message("system", [system])] if system else []
    call_ids: set[str] = set()
    for place, turn in enumerate(turns):
        name = f"messages[{place}].content"
        for message in _of_assistant(turn.content) if turn.role == "assistant" else _of_user(turn.role, turn.content):
            if message.call_id is not None and message.call_id not in call_ids:
                reason = f"has the result of the call {message.call_id[:80]!r}, which is not before it"
                raise InvalidRequest(name, reason)
            call_ids.update(call.id for call in message.calls)
            if found and found[-1].role == message.role != "tool":
                found[-1].add(message)
            else:
                found.append(message)
        if len(found) > MAX_MESSAGES:
            raise InvalidRequest(name, f"has, with those before, more than {MAX_MESSAGES} messages and results")
        if len(found[-1].calls) > MAX_TOOLS:
            raise InvalidRequest(name, f"has more than {MAX_TOOLS} calls")
    return [message.as_message() for message in found]


def _of_assistant(blocks: Sequence[Block]) -> Iterator[_Message]:
    reasoning = [block.thinking for block in blocks if isinstance(block, Thinking)]
    calls = [block for block in blocks if isinstance(block, ToolUse)]
    yield _Message("assistant", [text_of(blocks)], reasoning, calls)


def _of_user(role: str, blocks: Sequence[Block]) -> Iterator[_Message]:
    """Results of calls and the texts between them, in their order."""
    begin, has_results = 0, False
    for place, block in enumerate(blocks):
        if not isinstance(block, ToolResult):
            continue
        if text := text_of(blocks[begin:place]):
            yield _Message(role, [text])
        yield _Message("tool", [block.text], call_id=block.tool_use_id)
        begin, has_results = place + 1, True
    text = text_of(blocks[begin:])
    if text or not has_results:
        yield _Message(role, [text])
