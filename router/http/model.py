"""The model as the HTTP front uses it: it makes tokens from messages, and has the spelling of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from baton.errors import InvalidRequest, UnsupportedRequest
from baton.messages.generation import ModelCard
from baton.messages.request_limits import MAX_PROMPT_BYTES
from baton.text.chat_template import FIELD, MAX_RENDERED_BYTES
from baton.text.detokenizer import Detokenizer
from baton.text.fill_in_middle import find_gap_tokens
from baton.text.model_template import ModelTemplate
from baton.text.prompt_template import PromptTemplate, with_parts
from baton.text.tool_calls.formats import FORMATS
from baton.text.tool_calls.tools_in_text import tools_in_text
from router.admission.images import ImageRules, check_takes_images
from router.admission.validation import check_text
from router.http.bodies.tools import ToolBody
from router.http.image_urls import ImageFetcher
from router.http.parsed_text import AnswerParsers, as_token_id

NO_TOOLS = (
    "are not served for this model: its chat template describes no known format of calls "
    "(an operator may name one with --tool-call-parser)"
)
"""Why tools are refused that no format of calls is known for."""
_NOT_TRUSTED = "is not taken from requests here; an operator allows it with --trust-request-chat-template on"


class Vocabulary(Protocol):
    """The tokenizer as the HTTP front uses it; `baton.text.tokenizer.Tokenizer` is the real one."""

    def encode(self, text: str) -> list[int]: ...

    def encode_rendered(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def spelling(self, token_id: int) -> bytes: ...

    def detokenizer(self, shown_tokens: Sequence[int] = (), context: Sequence[int] = ()) -> Detokenizer: ...

    def special_ids(self, texts: Iterable[str]) -> list[int]: ...

    def added_id(self, text: str) -> int | None: ...

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]: ...

    def num_special_tokens(self, *, pair: bool) -> int: ...

    def with_special_tokens(self, first: Sequence[int], second: Sequence[int] | None) -> tuple[list[int], int]: ...


class ServedModel:
    """The model that the cluster serves."""

    def __init__(
        self,
        card: Callable[[], ModelCard],
        vocabulary: Vocabulary | None,
        template: ModelTemplate | None,
        now: Callable[[], datetime],
        request_template: Callable[[str], PromptTemplate] | None = None,
        answer_parsers: AnswerParsers | None = None,
        image_rules: ImageRules | None = None,
        image_fetcher: ImageFetcher | None = None,
    ) -> None:
        """`request_template` makes a template of the source that a request has; None: such requests are refused.
        `answer_parsers`: by default those that fit the model's template. `image_rules`: None: the model takes no
        images. `image_fetcher`: None: images come with their requests alone.
        """
        self.image_fetcher = image_fetcher
        self._image_rules = image_rules
        self._card = card
        self._vocabulary = vocabulary
        self._template = template
        self._now = now
        self._request_template = request_template
        self.answer_parsers = answer_parsers or AnswerParsers.of("auto", "auto", template)
        """How calls and reasoning in the model's text are found."""

    @property
    def card(self) -> ModelCard:
        """The model's card at present."""
        return self._card()

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The tokenizer; None: the model is served without one."""
        return self._vocabulary

    @property
    def most_image_bytes(self) -> int:
        """The most bytes of a chat's images together; 0: the model takes none."""
        return 0 if self._image_rules is None else self._image_rules.most_bytes

    @property
    def image_limits(self) -> Mapping[str, int] | None:
        """The bounds of a request's images under the names of the router's settings; None: the model takes none."""
        if (rules := self._image_rules) is None:
            return None
        return {
            "max_images": rules.most_images,
            "max_image_bytes": rules.most_bytes,
            "max_image_pixels": rules.most_pixels,
        }

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template of its own, and so was probably trained on chats."""
        return self._template is not None and not self._template.is_default

    def spelling(self, token_id: int) -> bytes:
        """The bytes that a token stands for; without a tokenizer `token_id:ID`."""
        if self._vocabulary is None:
            return as_token_id(token_id)
        return self._vocabulary.spelling(token_id)

    def detokenizer(self, context: Sequence[int]) -> Detokenizer | None:
        """A fresh detokenizer for a text behind tokens; None: the model is served without a tokenizer."""
        return None if self._vocabulary is None else self._vocabulary.detokenizer((), context)

    def encode(self, text: str, *, special: bool, field: str = "prompt") -> list[int]:
        """The token ids of a text; raises InvalidRequest. May be called in a thread.

        `special`: with the special tokens that the tokenizer puts around a text, as for /v1/completions. `field`: what
        a refusal names.
        """
        check_text(field, text, MAX_PROMPT_BYTES)
        vocabulary = self._with_text()
        return vocabulary.encode(text) if special else vocabulary.encode_rendered(text)

    def encode_around(self, before: str, after: str) -> list[int]:
        """The token ids of a prompt of which the model writes what is between two texts.

        Raises InvalidRequest, and UnsupportedRequest if the model has no tokens for that. May be called in a thread.
        """
        check_text("suffix", after, MAX_PROMPT_BYTES)
        if before:
            check_text("prompt", before, MAX_PROMPT_BYTES)
        vocabulary = self._with_text()
        tokens = find_gap_tokens(vocabulary)
        if tokens is None:
            raise UnsupportedRequest("suffix", "needs tokens for fill-in-the-middle, which this model has not")
        ids, _ = vocabulary.with_special_tokens(tokens.around(*vocabulary.encode_all([before, after])), None)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens; raises InvalidRequest. May be called in a thread."""
        return self._with_text().decode(token_ids)

    def _with_text(self) -> Vocabulary:
        if self._vocabulary is None:
            raise InvalidRequest("model", "is served without a tokenizer")
        return self._vocabulary

    def text_of(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[ToolBody],
        variables: Mapping[str, Any] | None = None,
        images: Sequence[bytes] = (),
        template_source: str | None = None,
        **options: bool,
    ) -> str:
        """The text that the template makes of messages; raises InvalidRequest, for `messages` if nothing else is wrong.

        `tools`: those that the model gets to know; `images`: those of the messages, in order; `template_source`: the
        template that the request has, in place of the model's own; `variables` and `options`: those of
        `ChatTemplate.render`. Waits for a child process.
        """
        # Before the template is rendered, so that nothing is done for images that are refused.
        read = check_takes_images(self.card, self._image_rules).read(images) if images else ()
        template = self._template_of(template_source)
        text = self._render(messages, variables, [tool.for_template() for tool in tools], template, **options)
        return self._image_rules.prompts.expanded(text, read) if read and self._image_rules is not None else text

    def rendered_ids(self, text: str) -> list[int]:
        """The token ids of a text that a chat template made. May be called in a thread."""
        return self._with_text().encode_rendered(text)

    def special_ids(self, texts: Iterable[str]) -> list[int]:
        """The ids of those texts that are special tokens."""
        return self._with_text().special_ids(texts)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]],
        template: PromptTemplate | None,
        **options: bool,
    ) -> str:
        """The text of messages. `template`: instead of the model's own."""
        template = template or self._template
        if self._vocabulary is None or template is None:
            message = "this model is served without a tokenizer; send token ids to /v1/completions"
            raise InvalidRequest("messages", message)
        has_place = template.traits.shows_tools if tools else not _has_calls(messages) or template.traits.shows_calls
        text = self._text(template, messages, variables, tools, **options) if has_place else ""
        # Some templates have a place for tools in some chats alone.
        if not has_place or not all(tool["function"]["name"] in text for tool in tools):
            messages = self._with_tools_in_text(messages, tools, template)
            text = self._text(template, messages, variables, (), **options)
        check_text("messages", text, MAX_RENDERED_BYTES)
        return text

    def _with_tools_in_text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], template: PromptTemplate
    ) -> Sequence[Mapping[str, Any]]:
        """The messages for a template without a place for tools; raises InvalidRequest if no format is known."""
        tool_format = self.answer_parsers.tools
        if tools and tool_format is None:
            raise InvalidRequest("tools", NO_TOOLS)
        # Where none is known, calls of earlier turns are written as most models write them.
        chosen = tool_format or FORMATS["hermes"]
        return tools_in_text(messages, tools, chosen, shows_system=template.traits.shows_system)

    def _text(
        self,
        template: PromptTemplate,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]],
        **options: bool,
    ) -> str:
        has_parts = not all(isinstance(message["content"], str) for message in messages)
        if has_parts or (template is self._template and template.traits.needs_parts):
            messages = with_parts(messages)
        return template.render(messages, self._now(), variables, tools, **options)

    def _template_of(self, source: str | None) -> PromptTemplate | None:
        """The template of a request, None if it has none; raises InvalidRequest if requests may not have one.

        A request may also name one of the model's own templates, as in transformers.
        """
        if source is None:
            return None
        if self._template is not None and (own := self._template.named(source)) is not None:
            return own
        if self._request_template is None:
            raise InvalidRequest(FIELD, _NOT_TRUSTED)
        return self._request_template(source)


def _has_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there are calls in messages, or their results."""
    return any(message.get("tool_calls") or message["role"] == "tool" for message in messages)
