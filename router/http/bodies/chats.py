"""The body of /v1/chat/completions, and the part of it that makes the prompt."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from baton.errors import InvalidRequest
from baton.messages.request_limits import MAX_MESSAGES, MAX_TEMPLATE_BYTES, MAX_TEMPLATE_VARIABLES, MAX_WORDS
from router.http.bodies.content_parts import Content, content_of, images_in
from router.http.bodies.fields import Ignored, NotServed, OnlyFalse, OnlyTrue
from router.http.bodies.generation import GenerationBody
from router.http.bodies.strict import Bounded, Strict
from router.http.bodies.tools import CallId, Calls, ToolChoice, Tools


def _template_variables(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_TEMPLATE_VARIABLES:
        raise ValueError(f"has {len(value)} variables; at most {MAX_TEMPLATE_VARIABLES} are taken")
    return value


def _template(value: Any) -> Any:
    if isinstance(value, str) and (num_bytes := len(value.encode(errors="surrogatepass"))) > MAX_TEMPLATE_BYTES:
        raise ValueError(f"has {num_bytes} bytes; at most {MAX_TEMPLATE_BYTES} are taken")
    return value or None


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
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

    def check(self, place: int) -> None:
        """Raises InvalidRequest for a field that does not go with the role. `place`: of the message in the chat."""
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise InvalidRequest(f"messages[{place}].tool_call_id", "and the role tool need each other")
        for field in ("tool_calls", "reasoning_content", "reasoning"):
            if getattr(self, field) and self.role != "assistant":
                raise InvalidRequest(f"messages[{place}].{field}", "needs the role assistant")
        if self.reasoning is not None and self.reasoning != self.given_reasoning:
            raise InvalidRequest(f"messages[{place}].reasoning", "is another than reasoning_content: send one of them")


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
