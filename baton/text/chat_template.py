"""A model's chat template, which turns messages into the text that the model continues.

As in transformers, templates are Jinja. They run in a sandbox, since a template is a program that came with the
weights: it can compute, but it can't change its arguments or access anything else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, Never, Self

from cachetools import LRUCache
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.errors import ConfigError, InvalidRequest
from baton.text.prompt_template import PromptTemplate, TemplateTraits, find_traits
from baton.text.template_files import DEFAULT, SPECIAL_TOKENS

DEFAULT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""The template for a model without one: a line for each message, such as `user: Hello`, and at last `assistant:`."""

_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the place in a message where the model continues it; the same as in transformers."""
TOOL_USE = "tool_use"
"""The name of the template for chats with tools, as in transformers."""
_OWN_NAMES = frozenset(
    {"messages", "add_generation_prompt", "tools", "documents", "strftime_now", "raise_exception", *SPECIAL_TOKENS}
)
FIELD = "chat_template"
"""The field of a request that has its own template."""
MAX_RENDERED_BYTES = 2 << 20
"""The longest text that a template may make of a chat."""
_MAX_REASON_CHARS = 500


class ChatTemplate(PromptTemplate):
    """One model's template, compiled, or several with names, of which the tools of a chat choose one as in
    transformers. Immutable, and safe to use from several threads.

    Neither compiling nor rendering it is bounded in time and memory. So only child processes make one of what came with
    a model or a request: see `model_template.py`.
    """

    def __init__(self, sources: str | Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Compile a model's template, or of those with names the ones for chats; raises ConfigError for one that is
        not valid.

        `special_tokens`: the texts of those that the model has, by their names in templates; others are undefined.
        """
        self._sources = {DEFAULT: sources} if isinstance(sources, str) else dict(sources)
        chosen = [name for name in (DEFAULT, TOOL_USE) if name in self._sources]
        self._templates = {name: _compiled(self._sources[name]) for name in chosen}
        self._special_tokens = dict(special_tokens)
        self._field, self._whose = "messages", "the model's chat template"

    @classmethod
    def of_request(cls, special_tokens: Mapping[str, str], source: str) -> ChatTemplate:
        """The template that came with a request; raises InvalidRequest for a source that is not a valid template."""
        try:
            template = cls(source, special_tokens)
        except ConfigError as error:
            raise InvalidRequest(
                FIELD, f"is not a valid Jinja template: {_shortened(error.__cause__ or error)}"
            ) from None
        template._field, template._whose = FIELD, "the template"
        return template

    @cached_property
    def traits(self) -> TemplateTraits:
        return find_traits(self.render)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        now: datetime,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        if continue_final_message:
            *before, last = messages
            tagged = [*before, {**last, "content": _continued(last["content"])}]
            return _cut_at_tag(self.render(tagged, now, variables, tools, add_generation_prompt=False))
        check_variables(variables)
        name = self._chosen(tools)
        try:
            pieces = self._templates[name].generate(
                self._special_tokens
                | dict(variables or {})
                | {
                    "messages": [self._with_known_role(message, name) for message in messages],
                    "add_generation_prompt": add_generation_prompt,
                    "tools": list(tools) if tools else None,
                    "documents": None,
                    "strftime_now": now.strftime,
                }
            )
            return "".join(_bounded(pieces, self._field))
        except InvalidRequest:
            raise
        except MemoryError:
            raise
        except Exception as error:  # A template may raise anything for messages that it was not written for.
            reason = f"{self._whose} rejects {'them' if self._field == 'messages' else 'the messages'}"
            raise InvalidRequest(self._field, f"{reason}: {_shortened(error)}") from error

    def _chosen(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """The name of the template for a chat with these tools; raises InvalidRequest if there is none for it."""
        if tools and TOOL_USE in self._templates:
            return TOOL_USE
        if DEFAULT in self._templates:
            return DEFAULT
        raise InvalidRequest(
            self._field,
            f"has no template: those of this model are named {', '.join(self._sources)}, and none is the default; "
            f"{'send tools, or ' if TOOL_USE in self._templates else ''}name one in {FIELD}",
        )

    def _with_known_role(self, message: Mapping[str, Any], template: str) -> Mapping[str, Any]:
        # "developer" is OpenAI's newer name for the role "system", and few templates know it.
        if message["role"] == "developer" and "developer" not in self._sources[template]:
            return {**message, "role": "system"}
        return message


def check_variables(variables: Mapping[str, Any] | None) -> None:
    """Raises InvalidRequest if a request's variables for the template have a name that is the request's own."""
    if taken := _OWN_NAMES.intersection(variables or ()):
        raise InvalidRequest("chat_template_kwargs", f"may not name {min(taken)}, which the request itself sets")


def _bounded(pieces: Iterable[str], field: str) -> Iterator[str]:
    """The pieces of a rendered text; raises InvalidRequest as soon as they are too long together."""
    num_bytes = 0
    for piece in pieces:
        num_bytes += len(piece.encode(errors="surrogatepass"))
        if num_bytes > MAX_RENDERED_BYTES:
            raise InvalidRequest(field, f"makes a text of more than {MAX_RENDERED_BYTES} bytes")
        yield piece


def _shortened(error: BaseException) -> str:
    text = str(error)
    return text if len(text) <= _MAX_REASON_CHARS else text[: _MAX_REASON_CHARS - 3] + "..."


def _compiled(source: str) -> Template:
    """A template of a model; raises ConfigError for a source that is not valid."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    try:
        return environment.from_string(source)
    except Exception as error:  # Python's compiler refuses what Jinja makes of deeply nested expressions.
        raise ConfigError(f"the model's chat template is broken (not valid Jinja): {error}") from error


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the model's own text for training. It is accepted and has no effect."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own way

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _continued(content: Any) -> Any:
    """The content of a message with the tag at its end: a text, or the last part of a list, which must be a text."""
    if isinstance(content, str):
        return content + _CONTINUED
    *before, last = content
    if "text" not in last:
        raise InvalidRequest("messages", "end with an image, which can't be continued")
    return [*before, {**last, "text": last["text"] + _CONTINUED}]


def _cut_at_tag(text: str) -> str:
    """The rendered text before the tag; raises InvalidRequest if the template left the tag out."""
    start = text.rfind(_CONTINUED.strip())
    if start < 0:
        raise InvalidRequest("messages", "the model's chat template changes the last one, so it can't be continued")
    # A template that trims messages would have trimmed the end of this one, too.
    return text[:start] if text.startswith(_CONTINUED, start) else text[:start].rstrip()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter also escapes characters that are special in HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> Never:
    raise TemplateError(message)


_MAX_COMPILED = 8
"""Templates of the model that a child keeps compiled: a model has one, or a few with names."""
_compiled_by_child: LRUCache[tuple[object, ...], ChatTemplate] = LRUCache(_MAX_COMPILED)


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
        if (template := _compiled_by_child.get(key)) is None:
            template = _compiled_by_child[key] = ChatTemplate(self.sources, self.special_tokens)
        return template


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
