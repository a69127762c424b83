"""What is to be encoded of a prompt before its positions can be computed: images, speech, texts for an encoder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.messages.spans import EncoderContent, Span
from baton.values import value


@value(frozen=True, slots=True)
class EncoderInput:
    """One input at its place in a prompt."""

    content: EncoderContent
    """What is to be encoded."""
    start: int
    """The first position of the prompt that one of its rows is for."""
    stop: int
    """The position behind the last one."""
    num_rows: int
    """Rows that its encoder makes; between them a prompt may have text."""

    @property
    def digest(self) -> str:
        """Names the content."""
        return self.content.digest


def encoder_inputs(spans: Sequence[Span], contents: Iterable[EncoderContent]) -> tuple[EncoderInput, ...]:
    """The inputs of a prompt, in order. `contents`: their data, as far as it is here."""
    known = {content.digest: content for content in contents}
    found: list[EncoderInput] = []
    for span in spans:
        if not span.is_encoded:
            continue
        if span.first_row:
            # A further part of the same content.
            first = found.pop()
            found.append(EncoderInput(first.content, first.start, span.stop, span.first_row + span.length))
        else:
            content = known.get(span.digest, EncoderContent(span.digest))
            found.append(EncoderInput(content, span.start, span.stop, span.length))
    return tuple(found)
