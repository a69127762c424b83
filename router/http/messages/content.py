"""The blocks of an answer's content in Anthropic's API, as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from router.http.answer_format import quote
from router.http.answer_items import AnswerItems, Ended, Grown, ItemChange, ItemKind
from router.http.parsed_text import AnswerPart, NamedCall

SIGNATURE = "unsigned"
"""The signature of thinking, which clients send back: it proves nothing, and nothing is checked."""
INVALID_INPUT = "INVALID_JSON"
"""The key of an input that is not JSON as a whole, since an input must be an object; Anthropic recommends this one."""
_CALL_PREFIX, _PREFIX = "call_", "toolu_"


def text_block(text: str) -> str:
    """A block of text."""
    return f'{{"type":"text","text":{quote(text)}}}'


def thinking_block(text: str, signature: str) -> str:
    """A block of reasoning."""
    return f'{{"type":"thinking","thinking":{quote(text)},"signature":{quote(signature)}}}'


def call_block(call: NamedCall, arguments: str) -> str:
    """A block with a call. `arguments`: an object of JSON."""
    name = call.id if not call.id.startswith(_CALL_PREFIX) else _PREFIX + call.id.removeprefix(_CALL_PREFIX)
    return f'{{"type":"tool_use","id":{quote(name)},"name":{quote(call.name)},"input":{arguments}}}'


@dataclass(slots=True)
class ContentBlock:
    """One block of a message."""

    kind: ItemKind
    index: int
    """Its place in the content."""
    call: NamedCall | None
    """The call that the block is; None: it is no call."""
    texts: list[str] = field(default_factory=list)
    is_complete: bool = False
    """Whether the block was not cut off; the arguments of a call are an object of JSON then."""

    def begun(self) -> str:
        """The block before its text."""
        if self.call is not None:
            return call_block(self.call, "{}")
        return text_block("") if self.kind == "text" else thinking_block("", "")

    def as_json(self, *, shows_thinking: bool) -> str:
        """The block with the text that was kept in it."""
        text = "".join(self.texts)
        if self.call is not None:
            return call_block(self.call, text if self.is_complete else f'{{"{INVALID_INPUT}":{quote(text)}}}')
        return text_block(text) if self.kind == "text" else thinking_block(text if shows_thinking else "", SIGNATURE)


class WholeContent:
    """The content of a whole message, made of the parts of its text."""

    def __init__(self) -> None:
        self._blocks = AnswerItems(ContentBlock)

    def add(self, parts: Iterable[AnswerPart]) -> None:
        """Add the next parts."""
        self._keep(self._blocks.take(parts))

    def finish(self, parts: Iterable[AnswerPart], *, is_complete: bool) -> None:
        """Add the last parts. `is_complete`: whether the answer ended by itself."""
        self.add(parts)
        self._keep(self._blocks.finish(is_complete=is_complete))

    def _keep(self, changes: Iterable[ItemChange[ContentBlock]]) -> None:
        for change in changes:
            match change:
                case Grown(block, text):
                    block.texts.append(text)
                case Ended(block, is_complete):
                    block.is_complete = is_complete

    def blocks(self, *, shows_thinking: bool) -> Sequence[str]:
        """The blocks as JSON."""
        return [block.as_json(shows_thinking=shows_thinking) for block in self._blocks.items]
