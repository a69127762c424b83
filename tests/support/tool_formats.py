"""Chat templates that describe each format of tool calls, and texts with calls in it, for tests of the HTTP service."""

from __future__ import annotations

import json
from collections.abc import Sequence

_BODY = """
{%- if tools %}{% for tool in tools %}<tool>{{ tool | tojson }}</tool>{% endfor %}{% endif %}
{%- for message in messages %}[{{ message.role }}]{{ message.content }}
{%- for call in message.tool_calls or [] %}<call {{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}>{% endfor %}
{%- if message.role == "tool" %}<of {{ message.tool_call_id }}>{% endif %}
{%- endfor %}[assistant]"""  # noqa: E501
MARKERS = {
    "hermes": '<tool_call>\n{"name": <function-name>}\n</tool_call>',
    "smollm2": '<tool_call>[{"name": "func_name1"}]</tool_call>',
    "llama3": "<|python_tag|>",
    "mistral": "[TOOL_CALLS] [",
    "mistral-args": "[TOOL_CALLS][ARGS]",
}
THINKING = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)
"""The end of a template of a model that thinks unless it is told not to."""
Call = tuple[str, object]


def template(name: str, more: str = "") -> str:
    """A template that renders tools and calls, and names the format in a comment."""
    return f"{{# {MARKERS.get(name, '')} #}}{_BODY}{more}"


def written(name: str, calls: Sequence[Call]) -> str:
    """Calls as a model writes them."""
    key = "parameters" if name == "llama3" else "arguments"
    objects = [json.dumps({"name": tool, key: arguments}) for tool, arguments in calls]
    match name:
        case "hermes":
            return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
        case "smollm2":
            return f"<tool_call>[{', '.join(objects)}]</tool_call>"
        case "llama3":
            return "<|python_tag|>" + "; ".join(objects)
        case "mistral":
            return f"[TOOL_CALLS] [{', '.join(objects)}]"
        case _:
            return "".join(f"[TOOL_CALLS]{tool}[ARGS]{json.dumps(arguments)}" for tool, arguments in calls)
