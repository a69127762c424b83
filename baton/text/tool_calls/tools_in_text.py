"""Tools, calls and their results as the text of messages, for chat templates that have no place for them.

The tools, and how to call them, are a text of the first system message, or of the first user message where the template
has no place for the former. Calls are the assistant's own text, in the format of the model's calls. Results are a user
message, that of several calls one message, since many templates want the roles to alternate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from baton.text.tool_calls.formats import ToolFormat

_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

To call functions, answer with nothing but the calls, in this form:
{call}"""
"""The words of Qwen2.5's chat template, for calls in any format."""
_RESULT_BEGIN, _RESULT_END = "<tool_response>\n", "\n</tool_response>"
_SYSTEM_ROLES = ("system", "developer")
Message = Mapping[str, Any]


def tools_in_text(
    messages: Sequence[Message], tools: Sequence[Message], tool_format: ToolFormat, *, shows_system: bool
) -> list[Message]:
    """The messages with tools, calls and results as text.

    `messages` and `tools`: as templates get them. `shows_system`: the template has a place for a system message.
    """
    complete: list[dict[str, Any]] = []
    is_result = False
    for message in messages:
        made = dict(message)
        if calls := made.pop("tool_calls", None):
            written = tool_format.written([_name_and_arguments(call["function"]) for call in calls])
            made["content"] = _joined(made["content"], written, "\n")
        if message["role"] != "tool":
            is_result = False
            complete.append(made)
            continue
        content = _joined(_joined(_RESULT_BEGIN, message["content"], ""), _RESULT_END, "")
        if is_result:
            complete[-1]["content"] = _joined(complete[-1]["content"], content, "\n")
        else:
            complete.append({"role": "user", "content": content})
        is_result = True
    if tools:
        _add_tools(complete, tools, tool_format, shows_system=shows_system)
    return list(complete)


def _add_tools(
    messages: list[dict[str, Any]], tools: Sequence[Message], tool_format: ToolFormat, *, shows_system: bool
) -> None:
    call = tool_format.written([("<function-name>", "<args-json-object>")])
    text = _TOOLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools), call=call)
    if shows_system and messages and messages[0]["role"] in _SYSTEM_ROLES:
        messages[0]["content"] = _joined(messages[0]["content"], text, "\n\n")
        return
    role = "system" if shows_system else "user"
    index = 0 if shows_system else next((n for n, message in enumerate(messages) if message["role"] == role), None)
    if shows_system or index is None:
        messages.insert(0, {"role": role, "content": text})
    else:
        messages[index]["content"] = _joined(text, messages[index]["content"], "\n\n")


def _name_and_arguments(function: Message) -> tuple[str, str]:
    arguments = function["arguments"]
    return function["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _joined(first: Any, second: Any, between: str) -> Any:
    """Two contents as one: a text, or parts if one of them has parts. An empty one leaves the other as it is."""
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return first + between + second
    as_parts = [
        [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        for content in (first, second)
    ]
    return [*as_parts[0], *([{"type": "text", "text": between}] if between else []), *as_parts[1]]
