"""The formats in which models call tools: how each is recognised, read, and demanded of an answer.

A demanded call is a grammar over bytes, which needs no special tokens: markers that are special tokens in a model's
vocabulary stand at the end of the prompt instead, and the model's text goes on behind them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import InvalidRequest
from baton.text.closed_objects import without_extra_keys
from baton.text.schema_compiling import JSON_OPTIONS
from baton.text.tool_calls.call_parser import CallParser
from baton.text.tool_calls.hermes import BEGIN, END, HermesParser
from baton.text.tool_calls.llama3 import TAG, Llama3Parser
from baton.text.tool_calls.mistral import ARGUMENTS, CALL_ID, CALLS, MistralParser

_NO_PARAMETERS = '{"type": "object", "properties": {}, "additionalProperties": false}'
_REASONING = 'reasoning[suffix="</think>"]: /(?s:.*)/\nspaces: /\\s{0,4}/\n'


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that a request offers."""

    name: str
    parameters: str
    """The JSON schema of its arguments, as text."""

    @classmethod
    def of(cls, name: str, parameters: Mapping[str, Any] | None) -> Tool:
        """A tool with these parameters, None for a tool without any; raises InvalidRequest if they are no object's."""
        if parameters is None:
            return cls(name, _NO_PARAMETERS)
        if parameters.get("type", "object") != "object":
            raise InvalidRequest("parameters", "must be the schema of an object")
        return cls(name, json.dumps({"type": "object", **parameters}))


@dataclass(frozen=True, slots=True)
class Demand:
    """What makes a model call a tool: a text at the end of the prompt, and a grammar of what follows it, in Lark."""

    prompt_end: str
    grammar: str


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

    def demand(
        self, tools: Sequence[Tool], *, is_parallel: bool, closes_objects: bool, reasons: bool, is_open: bool
    ) -> Demand:
        """The grammar of a call of one of these tools, or of several calls; raises InvalidRequest for a wrong schema.

        `closes_objects`: see `closed_objects`. `reasons`: the calls may follow reasoning, which `is_open` if the prompt
        has opened it; never with a `prompt_end`.
        """
        rules = [f"start: {_prefix(reasons, is_open)}calls"]
        more = f" ({_literal(self.between)} call)*" if is_parallel and self.between else ""
        rules.append(f"calls: {_literal(self.before)} call{more} {_literal(self.after)}")
        rules.append("call: " + " | ".join(f"call_{place}" for place in range(len(tools))))
        prompt_end, head = self.prompt_end, self.head
        if prompt_end and ARGUMENTS in head and len(tools) == 1:
            prompt_end, head = prompt_end + head.replace("NAME", tools[0].name), ""
        head = head.replace(ARGUMENTS, "")
        for place, tool in enumerate(tools):
            schema = without_extra_keys(tool.parameters) if closes_objects else tool.parameters
            guided = json.dumps({"x-guidance": JSON_OPTIONS, **json.loads(schema)})
            before = _literal(head.replace("NAME", tool.name))
            rules += [
                f"call_{place}: {before} arguments_{place} {_literal(self.tail)}",
                f"arguments_{place}: %json {guided}",
            ]
        if reasons:
            rules.append(_REASONING)
        return Demand(prompt_end, "\n".join(rules))


def _prefix(reasons: bool, is_open: bool) -> str:
    if not reasons:
        return ""
    return "reasoning spaces " if is_open else '("<think>" reasoning spaces)? '


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


_HERMES = ToolFormat(
    HermesParser,
    head='<tool_call>\n{"name": "NAME", "arguments": ',
    tail="}\n</tool_call>",
    between="\n",
    markers=(BEGIN, END),
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
