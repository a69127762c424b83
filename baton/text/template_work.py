"""A chat template that came with a request, and what it renders, as a message to a child process (`bounded_child`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Self

from baton.errors import InvalidRequest
from baton.text.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class TemplateWork:
    """One rendering of a request's template: the template, and the arguments of `ChatTemplate.render`."""

    source: str
    special_tokens: Mapping[str, str]
    messages: Sequence[Mapping[str, Any]]
    now: str
    """In ISO 8601."""
    variables: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    options: Mapping[str, bool]

    def as_json(self) -> str:
        """The work as a message."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, content: str) -> Self:
        """The work in a message that `as_json` made."""
        return cls(**json.loads(content))

    def render(self) -> str:
        """The rendered text; raises InvalidRequest, and MemoryError. Takes any time."""
        template = ChatTemplate.of_request(self.special_tokens, self.source)
        now = datetime.fromisoformat(self.now)
        return template.render(self.messages, now, self.variables, self.tools, **self.options)


_EXAMPLES = (
    "{% for message in messages %}{{ message | tojson }}{% endfor %}{{ strftime_now('%d %B %Y') }}",
    "{{ raise_exception('') }}",
    "{{ ''.__class__ }}",
    "{% for %}",
)


def load_all() -> None:
    """Load all modules that rendering needs, those for errors included, which Jinja imports when there is one."""
    for source in _EXAMPLES:
        work = TemplateWork(source, {}, [{"role": "user", "content": ""}], "2026-01-01T00:00:00", {}, [], {})
        with suppress(InvalidRequest):
            work.render()
