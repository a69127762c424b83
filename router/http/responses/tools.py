"""Tools and the choice among them in OpenAI's API of responses, where functions are flat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainValidator

from baton.messages.request_limits import MAX_TOOLS
from router.http.bodies.fields import NotServed, OnlyFalse
from router.http.bodies.strict import Bounded, Strict
from router.http.bodies.tools import (
    ChosenTools,
    Distinct,
    NamedFunction,
    NamedTool,
    ToolBody,
    ToolFields,
    ToolName,
    read_choice,
)

TOOL_FIELDS = ToolFields("parameters", "tool_choice.name", "tool_choice.tools", "text.format")


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: OnlyFalse = None

    # Known, but not served.
    allowed_callers: NotServed = None
    output_schema: NotServed = None

    def as_tool(self) -> ToolBody:
        """The tool as chats have it."""
        return ToolBody.of(self.name, self.description, self.parameters, self.strict)

    def as_object(self) -> dict[str, Any]:
        """The tool as a response shows it."""
        return self.model_dump(include={"type", "name", "description", "parameters", "strict"})


class ChosenTool(Strict):
    """A function that is to be called, or that may be."""

    type: Literal["function"]
    name: ToolName


class AllowedTools(Strict):
    """The functions among which the model may choose."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Bounded(MAX_TOOLS)]


_CHOICES: Mapping[str, type[ChosenTool | AllowedTools]] = {"function": ChosenTool, "allowed_tools": AllowedTools}


def _tool_type(value: Any) -> Any:
    """A list of tools; raises ValueError for one that is no function, by its type."""
    for place, tool in enumerate(value[:MAX_TOOLS] if isinstance(value, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise ValueError(f"has, at {place}, a tool of the type {kind[:40]!r}; only functions are served")
    return value


def _choice(value: Any) -> Any:
    name = value.get("type") if isinstance(value, dict) else None
    kind = _CHOICES.get(name) if isinstance(name, str) else None
    return read_choice(value, kind, ", or an object of the type function or allowed_tools")


FunctionTools = Annotated[
    Annotated[list[FunctionTool], Bounded(MAX_TOOLS)] | None, BeforeValidator(_tool_type), Distinct
]
FunctionChoice = Annotated[
    Literal["none", "auto", "required"] | ChosenTool | AllowedTools | None,
    PlainValidator(_choice, json_schema_input_type=Literal["none", "auto", "required"] | ChosenTool | AllowedTools),
]


def choice_of(
    choice: Literal["none", "auto", "required"] | ChosenTool | AllowedTools | None, tools: Sequence[FunctionTool]
) -> ChosenTools:
    """The choice as chats have it; raises InvalidRequest for allowed tools that are none of these tools."""
    if isinstance(choice, ChosenTool):
        return ChosenTools(NamedTool(type="function", function=NamedFunction(name=choice.name)))
    if not isinstance(choice, AllowedTools):
        return ChosenTools(choice)
    return ChosenTools.among(choice.mode, [tool.name for tool in choice.tools], tools, TOOL_FIELDS)
