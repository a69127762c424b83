"""The bodies of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from baton.errors import InvalidRequest
from baton.messages.generation import ModelCard, PromptEmbeds
from baton.messages.request_limits import (
    MAX_MESSAGES,
    MAX_PROMPT_BYTES,
    MAX_PROMPTS,
    MAX_TEMPLATE_BYTES,
    MAX_TEMPLATE_VARIABLE_BYTES,
    MAX_TEMPLATE_VARIABLES,
    MAX_WORDS,
)
from router.admission.checks import check_text
from router.admission.prompt_inputs import NOT_TAKEN
from router.http.bodies.content_parts import (
    Content,
    ImagePart,
    TemplateMessage,
    arguments_of,
    content_of,
    images_in,
    template_call,
)
from router.http.bodies.fields import (
    Bounded,
    Ignored,
    NotServed,
    OnlyFalse,
    OnlyTrue,
    ReasoningEffort,
    Strict,
    TextsOrIds,
    is_ids,
)
from router.http.bodies.tools import CallId, Calls, ChosenTools, ToolBody, ToolChoice, Tools
from router.http.chat_plan import ChatPlan, ToolOffer, plan_offer, reasoning_variables
from router.http.completions.generation import GenerationBody
from router.http.json_body import base64_bytes
from router.http.model import ServedModel


def _template_variables(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_TEMPLATE_VARIABLES:
        raise ValueError(f"has {len(value)} variables; at most {MAX_TEMPLATE_VARIABLES} are taken")
    return value


def _template(value: Any) -> Any:
    if isinstance(value, str) and (num_bytes := len(value.encode(errors="surrogatepass"))) > MAX_TEMPLATE_BYTES:
        raise ValueError(f"has {num_bytes} bytes; at most {MAX_TEMPLATE_BYTES} are taken")
    return value or None


MessageContent = Annotated[Content, PlainValidator(content_of, json_schema_input_type=str | list[dict[str, Any]])]


class Message(Strict):
    """One message of a chat. Fields of our own answers are accepted while they are empty: clients send them back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: MessageContent = ""
    name: str | None = None
    refusal: NotServed = None
    audio: NotServed = None
    function_call: NotServed = None
    tool_calls: Calls = None
    tool_call_id: CallId | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    # What clients keep with a message: of other servers' answers, and of their own.
    annotations: Ignored = None
    cache_control: Ignored = None
    parsed: Ignored = None
    provider_specific_fields: Ignored = None
    reasoning_details: Ignored = None
    thinking_blocks: Ignored = None

    @property
    def given_reasoning(self) -> str | None:
        """The reasoning before the message, which clients send under either name."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    def check(self, index: int) -> None:
        """Raises InvalidRequest for a field that does not go with the role. `place`: of the message in the chat."""
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise InvalidRequest(f"messages[{index}].tool_call_id", "and the role tool need each other")
        for field in ("tool_calls", "reasoning_content", "reasoning"):
            if getattr(self, field) and self.role != "assistant":
                raise InvalidRequest(f"messages[{index}].{field}", "needs the role assistant")
        if self.reasoning is not None and self.reasoning != self.given_reasoning:
            raise InvalidRequest(f"messages[{index}].reasoning", "is another than reasoning_content: send one of them")


class ChatPrompt(Strict):
    """Messages, and how the chat template makes a prompt of them."""

    messages: Annotated[list[Message], Field(min_length=1), Bounded(MAX_MESSAGES, "messages")]
    chat_template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(_template_variables)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: OnlyFalse = None
    chat_template: Annotated[str | None, BeforeValidator(_template)] = None
    documents: NotServed = None
    mm_processor_kwargs: NotServed = None
    tools: Tools = None

    def check_continuation(self) -> None:
        """Raises InvalidRequest for a last message that the answer can't continue, where it is to."""
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            raise InvalidRequest("add_generation_prompt", "must be false with continue_final_message")
        last, field = self.messages[-1], f"messages[{len(self.messages) - 1}]"
        if last.tool_calls:
            raise InvalidRequest(f"{field}.tool_calls", "can't be continued: their results come first")
        if not last.content:
            raise InvalidRequest(f"{field}.content", "is empty, so the answer can't continue it")

    @property
    def images(self) -> list[bytes]:
        """The images of all messages, in order."""
        return images_in([message.content for message in self.messages])


class ChatBody(ChatPrompt, GenerationBody):
    """POST /v1/chat/completions"""

    core_names = {  # noqa: RUF012
        **GenerationBody.core_names,
        "prompt": ("messages",),
        "images": ("messages",),
        "logprobs": ("top_logprobs", "logprobs"),
        "max_tokens": ("max_completion_tokens", "max_tokens"),
    }

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: Annotated[list[Literal["text"]], Bounded(MAX_WORDS)] | None = None
    echo: OnlyFalse = None
    parallel_tool_calls: bool | None = None
    tool_choice: ToolChoice = None
    audio: NotServed = None
    function_call: NotServed = None
    functions: NotServed = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: OnlyTrue = None
    web_search_options: NotServed = None

    # Hints: what an answer will probably be, and how long it is to be.
    prediction: Ignored = None
    verbosity: Ignored = None

    @property
    def num_logprobs(self) -> int | None:
        """The number of log-probabilities for the core; raises InvalidRequest for `top_logprobs` without `logprobs`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


def template_message(message: Message, index: int) -> Mapping[str, Any]:
    """A message of a chat; raises InvalidRequest. `place`: of the message in the chat."""
    message.check(index)
    calls = [
        template_call(call.id, call.function.name, arguments_of(call.function.arguments))
        for call in message.tool_calls or ()
    ]
    reasoning = [] if message.given_reasoning is None else [message.given_reasoning]
    content = message.content
    texts: list[str | ImagePart] = [content] if isinstance(content, str) else list(content)
    made = TemplateMessage(message.role, texts, reasoning, calls, message.tool_call_id, message.name)
    return made.as_message()


def plan_chat(body: ChatBody, model: ServedModel, card: ModelCard) -> ChatPlan:
    """Plan a chat; raises InvalidRequest that names the wrong field. May be called in a thread."""
    is_parallel = body.parallel_tool_calls is not False
    tools = body.tools or ()
    chosen = ChosenTools.of_chat(body.tool_choice, tools)
    offer = ToolOffer(tools, chosen.choice, is_parallel, body.constraint_field, allowed=chosen.allowed)
    variables = reasoning_variables(body.reasoning_effort)
    return plan_offer(offer, partial(chat_text, body, model, variables=variables), model, card)


def chat_text(
    body: ChatPrompt, model: ServedModel, tools: Sequence[ToolBody], variables: Mapping[str, Any] | None = None
) -> str:
    """The text of a chat's prompt; raises InvalidRequest that names the wrong field. Waits for a child process.

    `tools`: those that the model gets to know. `variables`: for the template, where the body has none of the name.
    """
    body.check_continuation()
    return model.text_of(
        [template_message(message, index) for index, message in enumerate(body.messages)],
        tools,
        {**(variables or {}), **_checked_variables(body.chat_template_kwargs)},
        body.images,
        body.chat_template,
        add_generation_prompt=not body.continue_final_message and body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
    )


def chat_prompt(body: ChatPrompt, model: ServedModel) -> list[int]:
    """The token ids of a chat; raises InvalidRequest that names the wrong field. Waits for a child process."""
    return model.rendered_ids(chat_text(body, model, body.tools or ()))


def _checked_variables(variables: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The variables, if a template can use them safely: their keys are names, their values scalars."""
    for name, value in (variables or {}).items():
        if not name.isidentifier():
            raise InvalidRequest("chat_template_kwargs", f"has the key {name[:32]!r}, which is no name")
        if not isinstance(value, str | int | float | bool | None):
            raise InvalidRequest(f"chat_template_kwargs.{name[:32]}", "must be a string, a number, a boolean or null")
        if isinstance(value, str) and len(value) > MAX_TEMPLATE_VARIABLE_BYTES // 4:
            check_text(f"chat_template_kwargs.{name[:32]}", value, MAX_TEMPLATE_VARIABLE_BYTES)
    return variables or {}


def _prompts(value: Any) -> Sequence[str | Sequence[int]]:
    if isinstance(value, str) or (isinstance(value, list) and value and is_ids(value)):
        return (value,)
    if isinstance(value, list) and len(value) > MAX_PROMPTS and not isinstance(value[0], int):
        raise ValueError(f"has {len(value)} prompts; at most {MAX_PROMPTS} are taken")
    if not isinstance(value, list) or not value or not all(isinstance(p, str) or is_ids(p) for p in value):
        raise ValueError("must be a string, a list of token ids, or a list of such")
    return tuple(value)


Prompts = Annotated[Sequence[str | Sequence[int]], PlainValidator(_prompts, json_schema_input_type=TextsOrIds)]


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompts: Prompts = Field(default=(), alias="prompt")
    prompt_embeds: str | None = None
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: OnlyTrue = None
    suffix: str | None = None

    def read_prompt_embeds(self, most_bytes: int) -> PromptEmbeds:
        """The rows in `prompt_embeds`, base64 of a safetensors file, which come before the prompt; none is looked into.

        `most_bytes`: of the file; 0: none is taken. Raises InvalidRequest, also for what does not go with rows.
        """
        text = self.prompt_embeds or ""
        if not most_bytes:
            raise InvalidRequest("prompt_embeds", NOT_TAKEN)
        if len(text) > base64_bytes(most_bytes):
            raise InvalidRequest(
                "prompt_embeds", f"has {len(text)} characters; at most {most_bytes} bytes are taken here"
            )
        if len(self.prompts) > 1:
            raise InvalidRequest("prompt", f"has {len(self.prompts)} prompts; prompt_embeds go with one")
        for name in ("echo", "truncate_prompt_tokens", "prompt_logprobs"):
            if getattr(self, name) is not None and getattr(self, name) is not False:
                raise InvalidRequest(name, "does not go with prompt_embeds")
        try:
            return PromptEmbeds(base64.b64decode(text, validate=True))
        except ValueError:
            raise InvalidRequest("prompt_embeds", "is not base64") from None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The alternatives at each token of the prompt; None: no log-probabilities of it.

        As in vLLM, a prompt that is repeated has as many as the output where the request does not say.
        """
        if self.prompt_logprobs is None and self.echo:
            return self.logprobs
        return self.prompt_logprobs

    def check_suffix(self) -> None:
        """Raises InvalidRequest for what does not go with a text behind the gap that the model fills."""
        if not self.suffix:
            return
        for name in ("prompt_embeds", "echo", "truncate_prompt_tokens"):
            if getattr(self, name) not in (None, False):
                raise InvalidRequest(name, "does not go with suffix")
        if not all(isinstance(prompt, str) for prompt in self.prompts):
            raise InvalidRequest("prompt", "must be a text where there is a suffix")
        # The suffix is part of each prompt, and must not multiply the work that a body of this size is.
        if len(self.prompts) * len(self.suffix) > MAX_PROMPT_BYTES:
            raise InvalidRequest(
                "suffix",
                f"has {len(self.suffix)} characters for each of {len(self.prompts)} prompts; all together may have "
                f"{MAX_PROMPT_BYTES}: send fewer prompts in a request",
            )

    def check_echo(self) -> None:
        """Raises InvalidRequest for what does not go with a prompt that is repeated or has log-probabilities."""
        self.check_prompt_logprobs()
        if not self.echo:
            return
        if self.stream and self.logprobs is not None:
            raise InvalidRequest("echo", "does not go with logprobs in a stream")
        if self.max_tokens == 0 and self.stream:
            raise InvalidRequest("max_tokens", "must be at least 1 in a stream")
        if self.max_tokens == 0 and self.min_tokens:
            raise InvalidRequest("min_tokens", f"must be 0 to max_tokens (0), not {self.min_tokens}")
