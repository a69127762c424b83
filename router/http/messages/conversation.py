"""Turns a conversation of Anthropic's API into messages as a chat template gets them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def template_messages(system: str, turns: Sequence[Turn]) -> Sequence[dict[str, Any]]:
    """The messages for the model's template; raises InvalidRequest for more than a chat may have.

    Messages of the same role that follow each other are one, as in Anthropic's API: many templates want the roles to
    alternate. Each result of a call is a message of its own, of the role `tool`.
    """
    found: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for place, turn in enumerate(turns):
        for message in _of_assistant(turn.content) if turn.role == "assistant" else _of_user(turn.role, turn.content):
            if found and found[-1]["role"] == message["role"] != "tool":
                _merge(found[-1], message)
            else:
                found.append(message)
        field = f"messages[{place}].content"
        if len(found) > MAX_MESSAGES:
            raise InvalidRequest(field, f"has, with those before, more than {MAX_MESSAGES} messages and results")
        if len(found[-1].get("tool_calls", ())) > MAX_TOOLS:
            raise InvalidRequest(field, f"has more than {MAX_TOOLS} calls")
    return found


def _of_assistant(blocks: Sequence[Block]) -> Iterator[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant", "content": text_of(blocks)}
    if reasoning := "\n".join(block.thinking for block in blocks if isinstance(block, Thinking) and block.thinking):
        message["reasoning_content"] = reasoning
    if calls := [block for block in blocks if isinstance(block, ToolUse)]:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    yield message


def _of_user(role: str, blocks: Sequence[Block]) -> Iterator[dict[str, Any]]:
    """Results of calls and the texts between them, in their order."""
    begin, has_results = 0, False
    for place, block in enumerate(blocks):
        if not isinstance(block, ToolResult):
            continue
        if text := text_of(blocks[begin:place]):
            yield {"role": role, "content": text}
        yield {"role": "tool", "content": block.text, "tool_call_id": block.tool_use_id}
        begin, has_results = place + 1, True
    text = text_of(blocks[begin:])
    if text or not has_results:
        yield {"role": role, "content": text}


def _merge(earlier: dict[str, Any], later: dict[str, Any]) -> None:
    """Add a message to the one before it."""
    for field in ("content", "reasoning_content"):
        if text := later.get(field):
            earlier[field] = f"{earlier[field]}\n{text}" if earlier.get(field) else text
    if "tool_calls" in later:
        earlier["tool_calls"] = [*earlier.get("tool_calls", ()), *later["tool_calls"]]
