"""Tools that a chat offers, the choice among them, and the calls that are in its messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import AfterValidator, PlainValidator

from baton.errors import InvalidRequest
from baton.messages.request_limits import MAX_TOOLS, MAX_TOOLS_BYTES
from baton.text.constraints.json_schemas import parse_schema
from baton.text.tool_calls.call_parser import TOOL_NAME
from baton.text.tool_calls.formats import Tool
from router.http.bodies.fields import Bounded, Ignored, Strict, read_part

_MAX_ID_CHARS = 256


def _name(value: Any) -> str:
    if not isinstance(value, str) or not TOOL_NAME.match(value):
        raise ValueError("must be 1 to 64 letters, digits or _ -")
    return value


def _call_id(value: Any) -> str:
    if isinstance(value, str) and 0 < len(value) <= _MAX_ID_CHARS:
        return value
    raise ValueError(f"must be a string of 1 to {_MAX_ID_CHARS} characters")


class _Named(Protocol):
    @property
    def name(self) -> str: ...


def _distinct(value: list[_Named] | None) -> list[_Named] | None:
    names = [tool.name for tool in value or ()]
    if twice := next((name for index, name in enumerate(names) if name in names[:index]), None):
        raise ValueError(f"has {twice} twice")
    return value


Distinct = AfterValidator(_distinct)
"""Refuses a list of tools of which two have the same name."""
ToolName = Annotated[str, PlainValidator(_name, json_schema_input_type=str)]
CallId = Annotated[str, PlainValidator(_call_id, json_schema_input_type=str)]


class FunctionBody(Strict):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Ignored = None


class ToolBody(Strict):
    """A tool, which is a function."""

    type: Literal["function"]
    function: FunctionBody
    cache_control: Ignored = None

    @classmethod
    def of(cls, name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None) -> Self:
        """The tool with this function."""
        function = FunctionBody(name=name, description=description, parameters=parameters, strict=strict)
        return cls(type="function", function=function)

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.name

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates get it."""
        given = self.function.model_dump(exclude_none=True, include={"name", "description", "parameters"})
        return {"type": "function", "function": given}


class CalledFunction(Strict):
    """The function of a call, and its arguments as JSON, which a model wrote."""

    name: ToolName
    arguments: str
    parsed_arguments: Ignored = None


class CallBody(Strict):
    """A call in a message of the assistant."""

    id: CallId | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Ignored = None


class NamedFunction(Strict):
    """The name of a function."""

    name: ToolName


class NamedTool(Strict):
    """The tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedNames(Strict):
    """The tools among which the model may choose, and whether it has to call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Bounded(MAX_TOOLS)]


class AllowedTools(Strict):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames


_CHOICES: Mapping[str, type[NamedTool | AllowedTools]] = {"function": NamedTool, "allowed_tools": AllowedTools}
_WORDS = ("none", "auto", "required")


def read_choice(value: Any, kinds: Mapping[str, type[Strict]]) -> Any:
    """The choice among tools: a word, None, or an object of one of these types; raises ValueError."""
    if value is None or value in _WORDS:
        return value
    name = value.get("type") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in kinds:
        raise ValueError(f"must be {', '.join(_WORDS)}, or an object of the type {' or '.join(kinds)}")
    return read_part(kinds[name], value)


_choice = partial(read_choice, kinds=_CHOICES)
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedTools | None,
    PlainValidator(
        _choice,
        json_schema_input_type=Literal["none", "auto", "required"] | NamedTool | AllowedTools,
    ),
]
Tools = Annotated[Annotated[list[ToolBody], Bounded(MAX_TOOLS)] | None, Distinct]
Calls = Annotated[list[CallBody], Bounded(MAX_TOOLS)] | None


@dataclass(frozen=True, slots=True)
class ToolFields:
    """The names that fields of tools have in one API, for refusals."""

    parameters_name: str
    """The name of the parameters, within a tool."""
    chosen_name: str
    """The name of the field with the name of the tool that is to be called."""
    allowed_names: str
    """The name of the field with the tools among which the choice is; empty: the API has none."""
    format: str
    """The name of the field with the format of the message's text."""

    def parameters(self, index: int) -> str:
        """The parameters of one of the tools."""
        return f"tools[{index}].{self.parameters_name}"

    def strict(self, index: int) -> str:
        """The switch that makes one of the tools strict, which stands beside its parameters."""
        outer, dot, _ = self.parameters_name.rpartition(".")
        return f"tools[{index}].{outer}{dot}strict"


CHAT_TOOL_FIELDS = ToolFields(
    "function.parameters", "tool_choice.function.name", "tool_choice.allowed_tools.tools", "response_format"
)


@dataclass(frozen=True, slots=True)
class ChosenTools:
    """The choice among tools in the words of chats, and the tools among which it is."""

    choice: Literal["none", "auto", "required"] | NamedTool | None
    allowed: Collection[str] | None = None
    """The names of the allowed tools; None: all."""

    @classmethod
    def among(
        cls, mode: Literal["auto", "required"], allowed: Collection[str], tools: Sequence[_Named], fields: ToolFields
    ) -> Self:
        """The choice among some tools; raises InvalidRequest if there are none, or one is none of `tools`."""
        if not allowed:
            raise InvalidRequest(fields.allowed_names, "is empty: let tool_choice be none")
        if unknown := sorted(set(allowed) - {tool.name for tool in tools}):
            raise InvalidRequest(fields.allowed_names, f"has {unknown[0]}, which is none of the tools")
        return cls(mode, set(allowed))

    @classmethod
    def of_chat(
        cls, choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None, tools: Sequence[_Named]
    ) -> Self:
        """The choice of a chat; raises InvalidRequest for allowed tools that are none of these tools."""
        if not isinstance(choice, AllowedTools):
            return cls(choice)
        names = [tool.function.name for tool in choice.allowed_tools.tools]
        return cls.among(choice.allowed_tools.mode, names, tools, CHAT_TOOL_FIELDS)


def tools_of(bodies: Sequence[ToolBody], fields: ToolFields) -> list[Tool]:
    """The tools as the formats of calls need them; raises InvalidRequest that names the parameters.

    Parameters are JSON objects within the bounds of a schema's size and depth, and with a bound on all together.
    """
    tools, num_bytes = [], 0
    for index, body in enumerate(bodies):
        try:
            tool = Tool.of(body.name, body.function.parameters, is_strict=body.function.strict is True)
            parse_schema(tool.parameters)
            tools.append(tool)
            num_bytes += len(tool.parameters.encode())
            if num_bytes > MAX_TOOLS_BYTES:
                reason = f"has, with those before, {num_bytes} bytes; all together may have {MAX_TOOLS_BYTES}"
                raise InvalidRequest("parameters", reason)
        except InvalidRequest as error:
            raise InvalidRequest(fields.parameters(index), error.reason) from None
    return tools
