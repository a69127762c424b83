"""What the tools, the choice among them and the reasoning of a chat mean for its prompt, and for its output.

The rules:

1. With tool_choice "none" the model does not get to know the tools, and no calls are looked for.
2. A demanded call (tool_choice "required" or a named tool) is a grammar of the output, so no other constraint goes with
   it, but for the format of the message's text, which such an output has not. Reasoning may come before it. A named
   tool is called once.
3. An output that the request constrains otherwise has no reasoning, since the constraint holds from its first token on.
4. Where no call is demanded and no other constraint is given, strict tools are a grammar of the output, too: of text in
   which their calls have arguments that fit. Not so in formats without a `trigger`, where a marker of calls or of
   reasoning is a special token, which no text of a grammar is, where the model has no token that ends its
   text, and where the grammar of all tools would be larger than grammars may be: there `strict` changes nothing.
5. Parameters of tools that may be called on demand, and of strict tools of such a grammar, are checked like the schemas
   of outputs, since they constrain one. Those of other tools may be any JSON schemas within the bounds of `tools_of`:
   only the model reads them.
6. A demanded call whose markers stand at the end of the prompt has no reasoning, which would come behind them.
7. Where only some of the tools are allowed, the model does not get to know the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

from baton.errors import InvalidRequest
from baton.messages.generation import GenerateRequest, ModelCard
from baton.text.constraints.json_schemas import MAX_SCHEMA_BYTES
from baton.text.reasoning import BEGIN, END, opens_reasoning
from baton.text.tool_calls.call_parser import MAX_CALLS
from baton.text.tool_calls.formats import CallGrammarOptions, Tool
from router.http.bodies.tools import CHAT_TOOL_FIELDS, NamedTool, ToolBody, ToolFields, tools_of
from router.http.model import NO_TOOLS, ServedModel
from router.http.parsed_text import TextParsing

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
    """The grammar of a demanded call, or of a text with calls of strict tools."""
    grammar_field: str
    """The client's field that asks for the grammar."""
    shown_tokens: Sequence[int]
    schemas: Mapping[str, str]
    """The parameters of tools in the grammar, by the fields that refusals name."""

    def applied(self, request: GenerateRequest) -> GenerateRequest:
        """The request of the body with what the plan adds."""
        if not self.parsing.is_needed and not self.schemas:
            return request
        if self.grammar is not None:
            # A demanded call takes the place of the format of the message's text.
            request = replace(request, json_schema=None, regex=None, choice=())
        return replace(
            request,
            grammar=self.grammar or request.grammar,
            constraint_field=self.grammar_field or request.constraint_field,
            shown_tokens=self.shown_tokens,
            is_parsed=self.parsing.is_needed,
            reasoning=("open" if self.parsing.is_open else "closed") if self.parsing.reasons else "none",
            schemas=self.schemas,
        )


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """The tools that a chat offers, and the choice among them, in whatever API it came."""

    tools: Sequence[ToolBody] = ()
    choice: str | NamedTool | None = None
    """The choice has the words of OpenAI's chats: none, auto, required, or the tool to call; None: auto."""
    is_parallel: bool = True
    """Whether an answer may have several calls."""
    constraint_field: str | None = None
    """The field that says what the whole answer must be; None: it may be any text."""
    fields: ToolFields = CHAT_TOOL_FIELDS
    allowed: Collection[str] | None = None
    """The names of the tools among which the model may choose; None: all."""

    def permits(self, name: str) -> bool:
        """Whether the model may call the tool of this name, and so gets to know it."""
        return self.choice != "none" and (self.allowed is None or name in self.allowed)


def plan_offer(
    offer: ToolOffer, text_with: Callable[[Sequence[ToolBody]], str], model: ServedModel, card: ModelCard
) -> ChatPlan:
    """Plan a chat with this offer; raises InvalidRequest that names the wrong field. May be called in a thread.

    `text_with` makes the text of the prompt; its argument: the tools that the model gets to know.
    """
    tools = tools_of(offer.tools, offer.fields)
    permitted = [offer.permits(tool.name) for tool in tools]
    callable_tools = list(compress(tools, permitted))
    wanted = _wanted(offer, callable_tools)
    offered = list(compress(offer.tools, permitted))
    parsers = model.answer_parsers
    tool_format = parsers.tools if offered else None
    if offered and tool_format is None:
        raise InvalidRequest("tools", NO_TOOLS)
    text = text_with(offered)
    reasons = parsers.reasons and (offer.constraint_field is None or bool(wanted))
    parsing = TextParsing(
        tool_format,
        [tool.name for tool in callable_tools],
        MAX_CALLS if offer.is_parallel and not isinstance(offer.choice, NamedTool) else 1,
        reasons=reasons,
        is_open=reasons and opens_reasoning(text),
        spelling=model.spelling,
    )
    # Some models have the markers as special tokens, whose texts are left out otherwise.
    markers = [*(tool_format.markers if tool_format is not None else ()), *((BEGIN, END) if reasons else ())]
    special = [text for text in markers if model.special_ids([text])]
    shown_tokens = model.special_ids(special) if special else ()
    strict = _held_to_schemas(offer, callable_tools, parsing, shown_tokens, card)
    grammar, grammar_field, in_grammar = None, "", wanted
    if wanted and tool_format is not None:
        if tool_format.prompt_end:
            if parsing.is_open:
                raise InvalidRequest("tool_choice", _OPEN_REASONING)
            parsing = replace(parsing, reasons=False)
        demand = tool_format.demand(wanted, replace(_surroundings(parsing, card), special=special))
        text, grammar, grammar_field = text + demand.prompt_end, demand.grammar, "tool_choice"
        parsing = replace(parsing, prompt_end=demand.prompt_end)
    elif strict and tool_format is not None:
        text_with_calls = tool_format.strict_calls(callable_tools, _surroundings(parsing, card))
        if len(text_with_calls.encode()) <= MAX_SCHEMA_BYTES:
            grammar, grammar_field = text_with_calls, offer.fields.strict(tools.index(strict[0]))
            in_grammar = strict
    return ChatPlan(
        model.rendered_ids(text),
        parsing,
        grammar,
        grammar_field,
        shown_tokens,
        {offer.fields.parameters(index): tool.parameters for index, tool in enumerate(tools) if tool in in_grammar},
    )


def _surroundings(parsing: TextParsing, card: ModelCard) -> CallGrammarOptions:
    """What the grammar of an answer's calls has to know."""
    return CallGrammarOptions(
        is_parallel=parsing.max_calls > 1,
        closes_objects=not card.permits_extra_keys,
        reasons=parsing.reasons,
        is_open=parsing.is_open,
    )


def _held_to_schemas(
    offer: ToolOffer, tools: Sequence[Tool], parsing: TextParsing, shown_tokens: Sequence[int], card: ModelCard
) -> Sequence[Tool]:
    """The strict tools of an offer that demands no call, if a grammar can hold their calls to the schemas (rule 4)."""
    has_trigger = parsing.tools is not None and parsing.tools.trigger
    if offer.constraint_field is not None or not has_trigger or shown_tokens or not card.has_end:
        return ()
    return [tool for tool in tools if tool.is_strict]


def reasoning_variables(effort: str | None) -> Mapping[str, Any]:
    """The variables of a template that stand for the effort of reasoning, in OpenAI's words; None: the model's own."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


def _wanted(offer: ToolOffer, tools: Sequence[Tool]) -> Sequence[Tool]:
    """The tools of which one has to be called; empty: none has to. Raises InvalidRequest."""
    if offer.choice in (None, "none", "auto"):
        return ()
    if not tools:
        raise InvalidRequest("tool_choice", "needs tools")
    if (field := offer.constraint_field) not in (None, offer.fields.format):
        raise InvalidRequest("tool_choice", f"does not go with {field}: each says what the whole answer must be")
    if not isinstance(offer.choice, NamedTool):
        return tools
    name = offer.choice.function.name
    named = [tool for tool in tools if tool.name == name]
    if not named:
        raise InvalidRequest(offer.fields.chosen_name, f"is {name}, which is none of the tools")
    return named
