"""Turns a conversation of Anthropic's API into messages as a chat template gets them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from baton.errors import InvalidRequest
from baton.messages.request_limits import MAX_MESSAGES, MAX_TOOLS
from router.http.messages.blocks import Block, Thinking, ToolResult, ToolUse, parts_of, text_of
from router.http.template_messages import TemplateMessage, template_call


class Turn(Protocol):
    """One message, as a client sends it."""

    @property
    def role(self) -> str: ...

    @property
    def content(self) -> Sequence[Block]: ...


def template_messages(system: str, turns: Sequence[Turn]) -> Sequence[dict[str, Any]]:
    """The messages for the model's template; raises InvalidRequest for more than a chat may have, and for the result of
    a call that is not before it.

    Messages of the same role that follow each other are one, as in Anthropic's API: many templates want the roles to
    alternate. Each result of a call is a message of its own, of the role `tool`.
    """
    found = [TemplateMessage("system", [system])] if system else []
    call_ids: set[str] = set()
    for place, turn in enumerate(turns):
        name = f"messages[{place}].content"
        for message in _of_assistant(turn.content) if turn.role == "assistant" else _of_user(turn.role, turn.content):
            if message.call_id is not None and message.call_id not in call_ids:
                reason = f"has the result of the call {message.call_id[:80]!r}, which is not before it"
                raise InvalidRequest(name, reason)
            call_ids.update(call["id"] for call in message.calls)
            if found and found[-1].role == message.role != "tool":
                found[-1].texts += message.texts
                found[-1].reasoning += message.reasoning
                found[-1].calls += message.calls
            else:
                found.append(message)
        if len(found) > MAX_MESSAGES:
            raise InvalidRequest(name, f"has, with those before, more than {MAX_MESSAGES} messages and results")
        if len(found[-1].calls) > MAX_TOOLS:
            raise InvalidRequest(name, f"has more than {MAX_TOOLS} calls")
    return [message.as_message() for message in found]


def _of_assistant(blocks: Sequence[Block]) -> Iterator[TemplateMessage]:
    reasoning = [block.thinking for block in blocks if isinstance(block, Thinking) and block.thinking]
    calls = [template_call(block.id, block.name, block.input) for block in blocks if isinstance(block, ToolUse)]
    yield TemplateMessage("assistant", list(filter(None, [text_of(blocks)])), reasoning, calls)


def _of_user(role: str, blocks: Sequence[Block]) -> Iterator[TemplateMessage]:
    """Results of calls, and the texts and images between them, in their order."""
    begin, has_results = 0, False
    for place, block in enumerate(blocks):
        if not isinstance(block, ToolResult):
            continue
        if parts := parts_of(blocks[begin:place]):
            yield TemplateMessage(role, parts)
        yield TemplateMessage("tool", [block.text], call_id=block.tool_use_id)
        begin, has_results = place + 1, True
    if parts := parts_of(blocks[begin:]):
        yield TemplateMessage(role, parts)
    elif not has_results:
        yield TemplateMessage(role)
