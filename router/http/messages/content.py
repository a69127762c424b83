"""The blocks of an answer's content in Anthropic's API, as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.text.tool_calls.events import CallEnded, Content
from router.http.answer_format import quote
from router.http.parsed_text import AnswerPart, CallArguments, NamedCall, Reasoning

SIGNATURE = "unsigned"
"""The signature of thinking, which clients send back: it proves nothing, and nothing is checked."""
INVALID_INPUT = "INVALID_JSON"
"""The key of an input that is not JSON as a whole, since an input must be an object; Anthropic recommends this one."""
_CALL_PREFIX, _PREFIX = "call_", "toolu_"


def text_block(text: str) -> str:
    """A block of text."""
    return f'{{"type":"text","text":{quote(text)},"citations":null}}'


def thinking_block(text: str, signature: str) -> str:
    """A block of reasoning."""
    return f'{{"type":"thinking","thinking":{quote(text)},"signature":{quote(signature)}}}'


def call_block(call: NamedCall, arguments: str) -> str:
    """A block with a call. `arguments`: an object of JSON."""
    name = call.id if not call.id.startswith(_CALL_PREFIX) else _PREFIX + call.id.removeprefix(_CALL_PREFIX)
    return f'{{"type":"tool_use","id":{quote(name)},"name":{quote(call.name)},"input":{arguments}}}'


@dataclass(slots=True)
class _Block:
    kind: type[AnswerPart]
    call: NamedCall | None = None
    texts: list[str] = field(default_factory=list)
    is_whole: bool = False
    """Whether the arguments of the call are an object of JSON."""

    def as_json(self, *, shows_thinking: bool) -> str:
        text = "".join(self.texts)
        if self.call is not None:
            return call_block(self.call, text if self.is_whole else f'{{"{INVALID_INPUT}":{quote(text)}}}')
        return text_block(text) if self.kind is Content else thinking_block(text if shows_thinking else "", SIGNATURE)


class WholeContent:
    """The content of a whole message, made of the parts of its text."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def add(self, parts: Iterable[AnswerPart]) -> None:
        for part in parts:
            match part:
                case Reasoning(text) | Content(text):
                    if not self._blocks or self._blocks[-1].kind is not type(part):
                        self._blocks.append(_Block(type(part)))
                    self._blocks[-1].texts.append(text)
                case NamedCall():
                    self._blocks.append(_Block(NamedCall, part))
                case CallArguments(_, text):
                    self._blocks[-1].texts.append(text)
                case CallEnded(is_complete):
                    self._blocks[-1].is_whole = is_complete

    def blocks(self, *, shows_thinking: bool) -> Sequence[str]:
        """The blocks as JSON; a message without any text has one block of text."""
        return [block.as_json(shows_thinking=shows_thinking) for block in self._blocks] or [text_block("")]
