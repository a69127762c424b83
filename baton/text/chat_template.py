"""A model's chat template, which turns messages into the text that the model continues.

As in transformers, templates are Jinja. They run in a sandbox, since a template is a program that came with the
weights: it can compute, but it can't change its arguments or access anything else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Never

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.errors import ConfigError, InvalidRequest

DEFAULT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""The template for a model without one: a line for each message, such as `user: Hello`, and at last `assistant:`."""

_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the place in a message where the model continues it; the same as in transformers."""
_PROBE = "baton probe"
_ANY_TIME = datetime(2024, 1, 1)
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OWN_NAMES = frozenset(
    {"messages", "add_generation_prompt", "tools", "documents", "strftime_now", "raise_exception", *_SPECIAL_TOKENS}
)
FIELD = "chat_template"
"""The field of a request that has its own template."""
MAX_RENDERED_BYTES = 2 << 20
"""The longest text that a template may make of a chat."""
_MAX_REASON_CHARS = 500


def has_chat_template(model_dir: Path) -> bool:
    """Whether a model directory has a template of its own; raises ConfigError when its files can't be read."""
    return _find_source(model_dir, _read(model_dir / "tokenizer_config.json")) is not DEFAULT_TEMPLATE


class ChatTemplate:
    """One model's template, compiled. Immutable, and safe to use from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile a model's template; raises ConfigError for a source that is not a valid template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template is broken (not valid Jinja): {error}") from error
        self.source = source
        """The template in Jinja."""
        self.special_tokens = {name: special_tokens.get(name, "") for name in _SPECIAL_TOKENS}
        """The text of each special token, by its name in templates; empty for those that the model has not."""
        self.is_default = source == DEFAULT_TEMPLATE
        """Whether the model has no template of its own."""
        self._knows_developer = "developer" in source
        self._field, self._whose = "messages", "the model's chat template"

    @cached_property
    def needs_parts(self) -> bool:
        """Whether the text of a message is rendered only as a part in a list, as by templates of some image models."""
        parts = [{"type": "text", "text": _PROBE}]
        return _PROBE not in self._rendered(_PROBE) and _PROBE in self._rendered(parts)

    def _rendered(self, content: str | list[dict[str, str]]) -> str:
        """The text of one message; empty if the template takes no such one."""
        try:
            return self.render([{"role": "user", "content": content}], _ANY_TIME)
        except InvalidRequest:
            return ""

    @classmethod
    def load(cls, model_dir: Path) -> ChatTemplate:
        """The template of a model directory, or the default one; raises ConfigError when its files can't be read."""
        config = _read(model_dir / "tokenizer_config.json")
        return cls(_find_source(model_dir, config), _find_special_tokens(model_dir, config))

    @classmethod
    def of_request(cls, special_tokens: Mapping[str, str], source: str) -> ChatTemplate:
        """The template that came with a request; raises InvalidRequest for a source that is not a valid template.

        Neither compiling nor rendering it is bounded in time and memory: see `request_template.RequestTemplate`.
        """
        try:
            template = cls(source, special_tokens)
        except Exception as error:  # Python's compiler refuses what Jinja makes of deeply nested expressions.
            raise InvalidRequest(
                FIELD, f"is not a valid Jinja template: {_shortened(error.__cause__ or error)}"
            ) from None
        template._field, template._whose = FIELD, "the template"
        return template

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
        """The prompt's text, special tokens included; raises InvalidRequest for messages that the template rejects.

        `variables`: further variables for the template, such as `enable_thinking`. `tools`: those that the model may
        call, each as `{"type": "function", "function": {...}}`. `continue_final_message`: the text ends within the last
        message, which the model then continues, as in transformers.
        """
        if continue_final_message:
            *before, last = messages
            tagged = [*before, {**last, "content": _continued(last["content"])}]
            return _cut_at_tag(self.render(tagged, now, variables, tools, add_generation_prompt=False))
        check_variables(variables)
        try:
            pieces = self._template.generate(
                self.special_tokens
                | dict(variables or {})
                | {
                    "messages": [self._with_known_role(message) for message in messages],
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
            raise InvalidRequest(self._field, "need more memory for the chat template than there is") from None
        except Exception as error:  # A template may raise anything for messages that it was not written for.
            reason = f"{self._whose} rejects {'them' if self._field == 'messages' else 'the messages'}"
            raise InvalidRequest(self._field, f"{reason}: {_shortened(error)}") from error

    def _with_known_role(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        # "developer" is OpenAI's newer name for the role "system", and few templates know it.
        if message["role"] == "developer" and not self._knows_developer:
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
    place = text.rfind(_CONTINUED.strip())
    if place < 0:
        raise InvalidRequest("messages", "the model's chat template changes the last one, so it can't be continued")
    # A template that trims messages would have trimmed the end of this one, too.
    return text[:place] if text.startswith(_CONTINUED, place) else text[:place].rstrip()


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


def _find_source(model_dir: Path, config: Mapping[str, Any]) -> str:
    plain = model_dir / "chat_template.jinja"
    if plain.is_file():
        return _text(plain)
    found = _read(model_dir / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else DEFAULT_TEMPLATE


def _find_special_tokens(model_dir: Path, config: Mapping[str, Any]) -> Mapping[str, str]:
    tokens = {}
    for source in (_read(model_dir / "special_tokens_map.json"), config):
        for name in _SPECIAL_TOKENS:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
    return tokens


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(_text(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
