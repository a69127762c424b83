"""A chat template and what it renders, as a message to a child process (`bounded_child`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Self

from cachetools import LRUCache

from baton.errors import InvalidRequest
from baton.text.chat_template import ChatTemplate
from baton.text.prompt_template import TemplateTraits
from baton.text.template_files import DEFAULT

_MAX_COMPILED = 8
"""Templates of the model that a child keeps compiled: a model has one, or a few with names."""
_compiled: LRUCache[tuple[object, ...], ChatTemplate] = LRUCache(_MAX_COMPILED)


@dataclass(frozen=True, slots=True)
class TemplateWork:
    """Work for one template: one rendering, with the arguments of `ChatTemplate.render`, or finding its traits."""

    sources: Mapping[str, str]
    """The template in Jinja by the name `default`, or a model's several ones by their names."""
    special_tokens: Mapping[str, str]
    messages: Sequence[Mapping[str, Any]] = ()
    now: str = ""
    """In ISO 8601."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, bool] = field(default_factory=dict)
    is_models: bool = False
    """Whether the template is the model's own, which the child keeps compiled. Those of strangers would take memory
    from the work that comes later."""

    def as_json(self) -> str:
        """The work as a message."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def of_json(cls, content: str) -> Self:
        """The work in a message that `as_json` made."""
        return cls(**json.loads(content))

    def render(self) -> str:
        """The rendered text. Raises InvalidRequest, ConfigError for a broken template of the model, and MemoryError.
        Takes any time.
        """
        now = datetime.fromisoformat(self.now)
        return self.template().render(self.messages, now, self.variables, self.tools, **self.options)

    def traits(self) -> str:
        """The template's traits in JSON. Raises and takes what `render` does."""
        return json.dumps(asdict(self.template().traits))

    def template(self) -> ChatTemplate:
        """The compiled template; that of the model is compiled once. Raises and takes what `render` does."""
        if not self.is_models:
            return ChatTemplate.of_request(self.special_tokens, self.sources[DEFAULT])
        key = (*self.sources.items(), *self.special_tokens.items())
        if (found := _compiled.get(key)) is None:
            found = _compiled[key] = ChatTemplate(self.sources, self.special_tokens)
        return found


def read_traits(content: str) -> TemplateTraits:
    """The traits that `TemplateWork.traits` has written."""
    return TemplateTraits(**json.loads(content))


_EXAMPLES = (
    "{% for message in messages %}{{ message | tojson }}{% endfor %}{{ strftime_now('%d %B %Y') }}",
    "{{ raise_exception('') }}",
    "{{ ''.__class__ }}",
    "{% for %}",
)


def load_all() -> None:
    """Load all modules that rendering needs, those for errors included, which Jinja imports when there is one."""
    for source in _EXAMPLES:
        work = TemplateWork({DEFAULT: source}, {}, [{"role": "user", "content": ""}], "2026-01-01T00:00:00")
        with suppress(InvalidRequest):
            work.render()
