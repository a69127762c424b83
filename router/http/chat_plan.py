"""What the tools, the choice among them and the reasoning of a chat mean for its prompt, and for its output.

The rules:

1. With tool_choice "none" the model does not get to know the tools, and no calls are looked for.
2. A demanded call (tool_choice "required" or a named tool) is a grammar of the output, so no other constraint goes with
   it. Reasoning may come before it.
3. An output that the request constrains otherwise has no reasoning, since the constraint holds from its first token on.
4. Parameters of tools that may be called on demand are checked like the schemas of outputs, since they constrain one.
   Those of other tools may be any JSON schemas within the bounds of `tools_of`: only the model reads them.
5. A demanded call whose markers stand at the end of the prompt has no reasoning, which would come behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.errors import InvalidRequest
from baton.messages.generation import GenerateRequest, ModelCard
from baton.text.reasoning import BEGIN, END, opens_reasoning
from baton.text.tool_calls.call_parser import MAX_CALLS
from baton.text.tool_calls.formats import Tool
from router.http.bodies.chats import ChatBody
from router.http.bodies.tools import NamedTool, parameters_field, tools_of
from router.http.model import ServedModel
from router.http.parsed_text import TextParsing

_NO_TOOLS = (
    "are not served for this model: its chat template describes no known format of calls "
    "(an operator may name one with --tool-call-parser)"
)
_OPEN_REASONING = (
    "demands a call, which begins at the end of this model's prompt, but the chat template opens reasoning there: "
    "turn reasoning off, or let tool_choice be auto"
)


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """The prompt of a chat, and what its request to the core has beside the fields of its body."""

    prompt: Sequence[int]
    parsing: TextParsing
    grammar: str | None
    """The grammar of a demanded call."""
    shown_tokens: Sequence[int]
    schemas: Mapping[str, str]
    """The parameters of tools that are demanded, by the fields that refusals name."""

    def applied(self, request: GenerateRequest) -> GenerateRequest:
        """The request of the body with what the plan adds."""
        if not self.parsing.is_needed and not self.schemas:
            return request
        return replace(
            request,
            grammar=self.grammar or request.grammar,
            shown_tokens=self.shown_tokens,
            is_parsed=self.parsing.is_needed,
            schemas=self.schemas,
        )


def plan_chat(body: ChatBody, model: ServedModel, card: ModelCard) -> ChatPlan:
    """Plan a chat; raises InvalidRequest that names the wrong field. May be called in a thread."""
    bodies = body.tools or []
    tools = tools_of(bodies)
    wanted = _wanted(body, tools)
    offered = [] if body.tool_choice == "none" else bodies
    parsers = model.answer_parsers
    tool_format = parsers.tools if offered else None
    if offered and tool_format is None:
        raise InvalidRequest("tools", _NO_TOOLS)
    text = model.chat_text(body, offered, _variables(body))
    constraint = body.constraint_field
    reasons = parsers.reasons and constraint is None
    parsing = TextParsing(
        tool_format,
        [tool.name for tool in tools],
        1 if body.parallel_tool_calls is False else MAX_CALLS,
        reasons=reasons,
        is_open=reasons and opens_reasoning(text),
    )
    # Some models have the markers as special tokens, whose texts are left out otherwise.
    markers = [*(tool_format.markers if tool_format is not None else ()), *((BEGIN, END) if reasons else ())]
    grammar = None
    if wanted and tool_format is not None:
        if tool_format.prompt_end:
            if parsing.is_open:
                raise InvalidRequest("tool_choice", _OPEN_REASONING)
            parsing = replace(parsing, reasons=False)
        demand = tool_format.demand(
            wanted,
            is_parallel=parsing.max_calls > 1,
            closes_objects=not card.permits_extra_keys,
            reasons=parsing.reasons,
            is_open=parsing.is_open,
        )
        text, grammar = text + demand.prompt_end, demand.grammar
        parsing = replace(parsing, prompt_end=demand.prompt_end)
    return ChatPlan(
        model.rendered_ids(text),
        parsing,
        grammar,
        model.special_ids(markers) if markers else (),
        {parameters_field(place): tool.parameters for place, tool in enumerate(tools) if tool in wanted},
    )


def _wanted(body: ChatBody, tools: Sequence[Tool]) -> Sequence[Tool]:
    """The tools of which one has to be called; empty: none has to. Raises InvalidRequest."""
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return ()
    if not tools:
        raise InvalidRequest("tool_choice", "needs tools")
    if (field := body.constraint_field) is not None:
        raise InvalidRequest("tool_choice", f"does not go with {field}: each says what the whole answer must be")
    if not isinstance(choice, NamedTool):
        return tools
    named = [tool for tool in tools if tool.name == choice.function.name]
    if not named:
        raise InvalidRequest("tool_choice.function.name", f"is {choice.function.name}, which is none of the tools")
    return named


def _variables(body: ChatBody) -> Mapping[str, Any]:
    """The variables of a template that stand for the effort of reasoning."""
    effort = body.reasoning_effort
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})
