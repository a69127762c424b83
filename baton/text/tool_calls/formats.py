"""The formats in which models call tools: how each is recognised, read, and demanded of an answer.

A demanded call is a grammar of text. Markers that are special tokens in a model's vocabulary are no text: the grammar
asks for these tokens by name, and those of Mistral, which have no names that a grammar can have, stand at the end of
the prompt instead, so that the model's text goes on behind them.

Where calls may but need not come (tool_choice "auto"), a grammar of free text can hold the calls of strict tools to
their schemas, if each call begins with a text and no special token: behind that text nothing but a call follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.errors import InvalidRequest
from baton.text.constraints.json_schemas import without_descriptions, without_extra_keys
from baton.text.constraints.lark_grammars import ANY_TEXT, EMPTY, LarkGrammar, Part, all_but, both, literal, pattern
from baton.text.constraints.schema_compiling import JSON_OPTIONS
from baton.text.reasoning import BEGIN as REASONING_BEGIN
from baton.text.reasoning import END as REASONING_END
from baton.text.reasoning import MAX_SPACES
from baton.text.tool_calls.call_parser import CallParser
from baton.text.tool_calls.parsers import (
    ARGUMENTS,
    BEGIN,
    CALL_ID,
    CALLS,
    END,
    TAG,
    HermesParser,
    Llama3Parser,
    MistralParser,
)

_NO_PARAMETERS = '{"type": "object", "properties": {}, "additionalProperties": false}'
_ANY_ARGUMENTS = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that a request offers."""

    name: str
    parameters: str
    """The JSON schema of its arguments, as text."""
    is_strict: bool = False
    """Whether the arguments of a call have to fit the schema, also where no call is demanded."""

    @classmethod
    def of(cls, name: str, parameters: Mapping[str, Any] | None, *, is_strict: bool = False) -> Tool:
        """A tool with these parameters, None for a tool without any; raises InvalidRequest if they are no object's."""
        if parameters is None:
            return cls(name, _NO_PARAMETERS, is_strict)
        if parameters.get("type", "object") != "object":
            raise InvalidRequest("parameters", "must be the schema of an object")
        return cls(name, json.dumps({"type": "object", **parameters}), is_strict)


@dataclass(frozen=True, slots=True)
class Demand:
    """What makes a model call a tool: a text at the end of the prompt, and a grammar of what follows it, in Lark."""

    prompt_end: str
    grammar: str


@dataclass(frozen=True, slots=True)
class CallGrammarOptions:
    """What a grammar of calls has to know beside the tools."""

    is_parallel: bool
    """Whether several calls may follow each other."""
    closes_objects: bool
    """Whether objects have no extra keys; see `json_schemas.without_extra_keys`."""
    reasons: bool
    """Whether the calls may follow reasoning."""
    is_open: bool
    """Whether the prompt has opened the reasoning."""
    special: Collection[str] = ()
    """The markers that are special tokens of the model; of `SPECIAL_MARKERS`."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format of calls."""

    parser: Callable[[Iterable[str], int], CallParser]
    """Makes a parser of one text, from the names of the request's tools and the most calls."""
    head: str
    """What stands before the arguments; NAME stands for the name."""
    tail: str
    """What stands behind the arguments."""
    before: str = ""
    between: str = ""
    after: str = ""
    """What stands before, between and behind all calls."""
    prompt_end: str = ""
    """The markers before the first call that are special tokens, and so are no part of a grammar."""
    markers: Sequence[str] = ()
    """Texts of the format that are special tokens in some models."""
    has_short_ids: bool = False
    """Whether the model's template takes only ids of calls with nine letters and digits."""
    trigger: str = ""
    """The text with which all calls begin; empty: there is none, or it is a special token."""

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """The text of calls, each a name and its arguments as JSON, as a model of this format writes them."""
        texts = [self.head.replace("NAME", name) + arguments + self.tail for name, arguments in calls]
        return self.prompt_end + self.before + (self.between or self.prompt_end).join(texts) + self.after

    def demand(self, tools: Sequence[Tool], surroundings: CallGrammarOptions) -> Demand:
        """The grammar of a call of one of these tools, or of several calls; raises InvalidRequest for a wrong schema.

        There is no reasoning with a `prompt_end`.
        """
        written = partial(_literal, special=surroundings.special)
        rules = [f"start: {_prefix(surroundings)}calls"]
        more = f" ({written(self.between)} call)*" if surroundings.is_parallel and self.between else ""
        rules.append(f"calls: {written(self.before)} call{more} {written(self.after)}")
        rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
        prompt_end, head = self.prompt_end, self.head
        if prompt_end and ARGUMENTS in head and len(tools) == 1:
            prompt_end, head = prompt_end + head.replace("NAME", tools[0].name), ""
        head = head.replace(ARGUMENTS, "")
        for number, tool in enumerate(tools):
            before = written(head.replace("NAME", tool.name))
            rules += [
                f"call_{number}: {before} arguments_{number} {written(self.tail)}",
                f"arguments_{number}: %json {_guided(tool.parameters, closes_objects=surroundings.closes_objects)}",
            ]
        if surroundings.reasons:
            rules += _reasoning(surroundings)
        return Demand(prompt_end, "\n".join(rules))

    def strict_calls(self, tools: Sequence[Tool], surroundings: CallGrammarOptions) -> str:
        """The grammar of a text in which the arguments of strict tools' calls fit their schemas; for a `trigger`.

        Behind each trigger is a call of one of these tools, and the arguments of the others are any JSON objects. Not
        so in reasoning, and, unless calls are parallel, behind the first call: there the trigger is plain text.
        """
        is_parallel, closes_objects = surroundings.is_parallel, surroundings.closes_objects
        grammar, trigger = LarkGrammar(), literal(self.trigger)
        calls = []
        for tool in tools:
            schema = tool.parameters if tool.is_strict else _ANY_ARGUMENTS
            arguments = grammar.json(_guided(schema, closes_objects=closes_objects and tool.is_strict))
            head = self.head.replace("NAME", tool.name)
            begin = head if self.before else head.removeprefix(self.trigger)
            calls.append(grammar.sequence([literal(begin), arguments, literal(self.tail)]))
        call = grammar.shared(grammar.choice(calls))
        if self.before:
            opening = literal(self.before.removeprefix(self.trigger))
            others = [grammar.repeated(grammar.sequence([literal(self.between), call]), 0, None)] if is_parallel else []
            call = grammar.shared(grammar.sequence([opening, call, *others, literal(self.after)]))
        first = grammar.choice([grammar.shortest(text) for text in _texts_before(trigger, grammar, surroundings)])
        later = (
            grammar.repeated(grammar.sequence([grammar.text_until(trigger), call]), 0, None) if is_parallel else EMPTY
        )
        return grammar.text(grammar.choice([grammar.sequence([first, call, later, ANY_TEXT]), ANY_TEXT]))


def _texts_before(trigger: Part, grammar: LarkGrammar, surroundings: CallGrammarOptions) -> Sequence[Part]:
    """The texts that end with the first trigger, which is not in the reasoning."""
    ended = grammar.sequence([ANY_TEXT, literal(REASONING_END), ANY_TEXT, trigger])
    if surroundings.is_open:
        return [ended]
    plain = grammar.sequence([ANY_TEXT, trigger])
    if not surroundings.reasons:
        return [plain]
    begin = grammar.sequence([pattern(rf"\s{{0,{MAX_SPACES}}}"), literal(REASONING_BEGIN)])
    return [
        both(all_but(grammar.sequence([begin, ANY_TEXT])), plain),
        grammar.sequence([begin, ended]),
    ]


def _guided(schema: str, *, closes_objects: bool) -> str:
    """The schema of arguments as a grammar has it."""
    closed = without_extra_keys(schema) if closes_objects else schema
    return json.dumps({"x-guidance": JSON_OPTIONS, **without_descriptions(json.loads(closed))})


def _prefix(surroundings: CallGrammarOptions) -> str:
    if not surroundings.reasons:
        return ""
    begin = _literal(REASONING_BEGIN, surroundings.special)
    return "reasoning spaces " if surroundings.is_open else f"({begin} reasoning spaces)? "


def _reasoning(surroundings: CallGrammarOptions) -> Sequence[str]:
    """The rules of reasoning up to its end, and of the blanks behind it."""
    blanks = r"spaces: /\s{0,4}/"
    if REASONING_END in surroundings.special:
        return [f"reasoning: THOUGHTS {REASONING_END}", "THOUGHTS: /(?s:.*)/", blanks]
    return [f"reasoning[suffix={json.dumps(REASONING_END)}]: /(?s:.*)/", blanks]


def _literal(text: str, special: Collection[str] = ()) -> str:
    """A text in a rule, in which markers that are special tokens stand for these tokens."""
    pieces = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
    return " ".join(piece if piece in special else json.dumps(piece) for piece in pieces if piece)


_HERMES = ToolFormat(
    HermesParser,
    head='<tool_call>\n{"name": "NAME", "arguments": ',
    tail="}\n</tool_call>",
    between="\n",
    markers=(BEGIN, END),
    trigger=BEGIN,
)
FORMATS: Mapping[str, ToolFormat] = {
    "hermes": _HERMES,
    "llama3": ToolFormat(Llama3Parser, head='{"name": "NAME", "parameters": ', tail="}", between="; ", markers=(TAG,)),
    "mistral": ToolFormat(
        MistralParser,
        head='{"name": "NAME", "arguments": ',
        tail="}",
        before="[",
        between=", ",
        after="]",
        prompt_end=CALLS,
        markers=(CALLS,),
        has_short_ids=True,
    ),
    "mistral-args": ToolFormat(
        MistralParser,
        head=f"NAME{ARGUMENTS}",
        tail="",
        prompt_end=CALLS,
        markers=(CALLS, ARGUMENTS, CALL_ID),
        has_short_ids=True,
    ),
    "smollm2": ToolFormat(
        HermesParser,
        head='{"name": "NAME", "arguments": ',
        tail="}",
        before="<tool_call>[",
        between=", ",
        after="]</tool_call>",
        markers=(BEGIN, END),
        trigger=BEGIN,
    ),
}
"""All formats, by the names that `--tool-call-parser` takes."""


def format_of_template(template: str) -> str | None:
    """The name of the format that a chat template describes; None if it describes none of FORMATS."""
    if CALLS in template:
        return "mistral-args" if ARGUMENTS in template else "mistral"
    if TAG in template or '"parameters": dictionary' in template:
        return "llama3"
    # Qwen3-Coder and GLM write XML within the same markers.
    if "<tool_call>" not in template or "<function=" in template or "<arg_key>" in template:
        return None
    return "smollm2" if re.search(r"<tool_call>\s*\[", template) else "hermes"


def template_reasons(template: str) -> bool:
    """Whether a chat template is of a model that writes its reasoning between `<think>` and `</think>`."""
    return "</think>" in template
