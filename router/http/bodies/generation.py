"""The bodies that clients may send: one model for each endpoint. Names of fields are OpenAI's, or else vLLM's.

An unknown field is refused by its name. A field that is known but not served is refused, too, unless its value changes
nothing. Fields that change no answer are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError

from baton.errors import InvalidRequest
from baton.messages.generation import GenerateRequest
from baton.messages.request_limits import (
    MAX_CHOICES,
    MAX_INPUTS,
    MAX_LOGIT_BIAS,
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPLATE_BYTES,
    MAX_TEMPLATE_VARIABLES,
    MAX_TOKEN_IDS,
)
from baton.messages.sampling import RepetitionDetection

ANY_OBJECT = '{"type": "object"}'
"""The schema of the response format json_object."""
_MAX_NAME_CHARS = 80
"""Longer names of fields are cut in refusals, and not compared with known names, which would take seconds."""
Constrained = tuple[str, "str | Sequence[str] | None"]
"""A field of the core that says what an answer must be, and its value."""
B = TypeVar("B", bound="Body")
M = TypeVar("M", bound="Strict")


def _prompts(value: Any) -> Sequence[str | Sequence[int]]:
    if isinstance(value, str) or (isinstance(value, list) and value and _is_ids(value)):
        return (value,)
    if isinstance(value, list) and len(value) > MAX_PROMPTS and not isinstance(value[0], int):
        raise ValueError(f"has {len(value)} prompts; at most {MAX_PROMPTS} are taken")
    if not isinstance(value, list) or not value or not all(isinstance(p, str) or _is_ids(p) for p in value):
        raise ValueError("must be a string, a list of token ids, or a list of such")
    return tuple(value)


def _inputs(value: Any) -> Sequence[str | Sequence[int]]:
    if value in ("", []):
        raise ValueError("is empty")
    if isinstance(value, str) or _is_ids(value):
        return (value,)
    if isinstance(value, list) and len(value) > MAX_INPUTS and not isinstance(value[0], int):
        raise ValueError(f"has {len(value)} inputs; at most {MAX_INPUTS} are taken")
    is_alike = isinstance(value, list) and (all(isinstance(one, str) for one in value) or all(map(_is_ids, value)))
    if not is_alike:
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")
    if not all(value):
        raise ValueError(f"has an input that is empty: number {next(n for n, one in enumerate(value) if not one)}")
    return tuple(value)


def _is_ids(value: Any) -> bool:
    """Whether this is a list of token ids; raises ValueError for more than any request may have."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        return False
    if len(value) > MAX_TOKEN_IDS:
        raise ValueError(f"has {len(value)} token ids; at most {MAX_TOKEN_IDS} are taken")
    return True


def _token_ids(value: Any) -> Sequence[int]:
    if not _is_ids(value):
        raise ValueError("must be a list of token ids")
    return list(value)


def _stop_token_ids(value: Any) -> Sequence[int]:
    if value is None:
        return ()
    if isinstance(value, list) and len(value) > MAX_STOP_TOKEN_IDS:
        raise ValueError(f"has {len(value)} entries; at most {MAX_STOP_TOKEN_IDS} are taken")
    return _token_ids(value)


def _stop(value: Any) -> Sequence[str]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and len(value) > MAX_STOP_STRINGS:
        raise ValueError(f"has {len(value)} strings; at most {MAX_STOP_STRINGS} are taken")
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError("must be a string or a list of strings")
    return tuple(value)


def _logit_bias(value: Any) -> Mapping[int, float]:
    if value is None:
        return {}
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(value)} entries; at most {MAX_LOGIT_BIAS} are taken")
    if not isinstance(value, dict) or not all(type(bias) in (int, float) for bias in value.values()):
        raise ValueError("must be an object from token ids to numbers")
    if bad := next((key for key in value if not (key.isascii() and key.isdigit() and len(key) < 16)), None):
        raise ValueError(f"has the key {bad[:32]!r}, which is no token id")
    try:
        return {int(key): float(bias) for key, bias in value.items()}
    except OverflowError:
        raise ValueError("has a bias that is too large") from None


def _content(value: Any) -> str:
    """The text of a message; parts are joined by newlines, as in vLLM."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    texts = []
    for place, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str) or len(part) != 2:
            raise ValueError(f"part {place} must be {{'type': 'text', 'text': ...}}: only text is served")
        texts.append(part["text"])
    return "\n".join(texts)


def bounded_messages(value: Any) -> Any:
    """Messages whose number is checked, before each message is; raises ValueError."""
    if isinstance(value, list) and len(value) > MAX_MESSAGES:
        raise ValueError(f"has {len(value)} messages; at most {MAX_MESSAGES} are taken")
    return value


def _template_variables(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_TEMPLATE_VARIABLES:
        raise ValueError(f"has {len(value)} variables; at most {MAX_TEMPLATE_VARIABLES} are taken")
    return value


def _template(value: Any) -> Any:
    if isinstance(value, str) and (num_bytes := len(value.encode(errors="surrogatepass"))) > MAX_TEMPLATE_BYTES:
        raise ValueError(f"has {num_bytes} bytes; at most {MAX_TEMPLATE_BYTES} are taken")
    return value or None


def _schema(value: Any) -> str | None:
    """A JSON schema as text, which is checked later."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise ValueError("must be a JSON schema: an object, or its text")
    return json.dumps(value)


def _pattern(value: Any) -> str | None:
    """A regular expression or a grammar, which is checked later."""
    if value is None or (isinstance(value, str) and value):
        return value
    raise ValueError("must be a text that is not empty")


def _choice(value: Any) -> Sequence[str]:
    if value is None:
        return ()
    if isinstance(value, list) and len(value) > MAX_CHOICES:
        raise ValueError(f"has {len(value)} texts; at most {MAX_CHOICES} are taken")
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise ValueError("must be a list of texts, none of them empty")
    return tuple(value)


def _truncation(value: Any) -> int | None:
    if value is None or (type(value) is int and (value == -1 or 1 <= value <= MAX_TOKEN_IDS)):
        return value
    raise ValueError(f"must be 1 to {MAX_TOKEN_IDS}, or -1 for as many tokens as the model takes")


def _not_served(value: Any) -> None:
    if value not in (None, "", [], {}):
        raise ValueError("is not served here")


_PROMPTS = str | list[int] | list[str] | list[list[int]]
Prompts = Annotated[Sequence[str | Sequence[int]], PlainValidator(_prompts, json_schema_input_type=_PROMPTS)]
Inputs = Annotated[Sequence[str | Sequence[int]], PlainValidator(_inputs, json_schema_input_type=_PROMPTS)]
TokenIds = Annotated[Sequence[int], PlainValidator(_token_ids, json_schema_input_type=list[int])]
Stop = Annotated[Sequence[str], PlainValidator(_stop, json_schema_input_type=str | list[str])]
StopTokenIds = Annotated[Sequence[int], PlainValidator(_stop_token_ids, json_schema_input_type=list[int])]
LogitBias = Annotated[Mapping[int, float], PlainValidator(_logit_bias, json_schema_input_type=dict[str, float])]
Content = Annotated[str, PlainValidator(_content, json_schema_input_type=str | list[dict[str, str]])]
NotServed = Annotated[None, PlainValidator(_not_served, json_schema_input_type=None)]
Truncation = Annotated[int | None, PlainValidator(_truncation, json_schema_input_type=int)]
Schema = Annotated[str | None, PlainValidator(_schema, json_schema_input_type=dict[str, Any] | str)]
Pattern = Annotated[str | None, PlainValidator(_pattern, json_schema_input_type=str)]
Choice = Annotated[Sequence[str], PlainValidator(_choice, json_schema_input_type=list[str])]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Strict(BaseModel):
    """A model that takes its own fields alone, each of its own type; the base of all bodies."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class StreamOptions(Strict):
    """What a stream contains beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Strict):
    """A schema in OpenAI's wrapping. Every answer conforms to it, whether `strict` is set or not."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Strict):
    """The format that the text of an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def as_schema(self) -> str | None:
        """The schema as JSON, None for any text; raises InvalidRequest if type and schema do not fit."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequest("response_format.json_schema", "and the type json_schema need each other")
        if self.json_schema is None:
            return ANY_OBJECT if self.type == "json_object" else None
        return json.dumps(self.json_schema.schema_)


class StructuredOutputs(Strict):
    """What the text of an answer must be, in vLLM's words."""

    json_: Schema = Field(None, alias="json")
    json_object: bool | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    disable_fallback: bool | None = None
    regex: Pattern = None
    choice: Choice = ()
    grammar: Pattern = None
    structural_tag: NotServed = None
    whitespace_pattern: NotServed = None

    def as_constraint(self) -> Constrained:
        """The one that is given; raises InvalidRequest unless there is exactly one."""
        given: list[Constrained] = [
            (kind, value) for kind in ("regex", "choice", "grammar") if (value := getattr(self, kind))
        ]
        given += [("json_schema", self.json_)] if self.json_ is not None else []
        given += [("json_schema", ANY_OBJECT)] if self.json_object else []
        if len(given) != 1:
            message = "must have exactly one of json, json_object: true, regex, choice and grammar"
            raise InvalidRequest("structured_outputs", message)
        return given[0]


class RepetitionBody(Strict):
    """Which repetition ends the output with an error; as in vLLM."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def rule(self) -> RepetitionDetection:
        """The rule for the engine."""
        return RepetitionDetection(self.max_pattern_size, self.min_pattern_size, self.min_count)


class Body(Strict):
    """The fields that completions and chats have in common."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    top_n_sigma: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias = Field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Stop = ()
    stop_token_ids: StopTokenIds = ()
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    repetition_detection: RepetitionBody | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    ttft_slo_ms: Positive | None = None
    tpot_slo_ms: Positive | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema = None
    guided_regex: Pattern = None
    guided_choice: Choice = ()
    guided_grammar: Pattern = None
    truncate_prompt_tokens: Truncation = None
    return_tokens_as_token_ids: bool | None = None

    # Only these values are served.
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    # Ignored: they change no answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Known, but not served.
    allowed_token_ids: NotServed = None
    bad_words: NotServed = None
    kv_transfer_params: NotServed = None
    logits_processors: NotServed = None
    prompt_logprobs: NotServed = None
    vllm_xargs: NotServed = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with an event that has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_all(self) -> bool:
        """Whether each event has the usage so far."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def num_generated(self) -> int:
        """Number of sequences that are generated for each prompt; not checked."""
        return max(1 if self.n is None else self.n, self.best_of or 0)

    def _constraint(self) -> dict[str, Any]:
        """What the answer must be, as a field of the core; empty: any text. Raises InvalidRequest for several."""
        schema = self.response_format.as_schema() if self.response_format is not None else None
        found: dict[str, Constrained] = {
            "response_format": ("json_schema", schema),
            "structured_outputs": (
                self.structured_outputs.as_constraint()
                if self.structured_outputs is not None
                else ("json_schema", None)
            ),
            "guided_json": ("json_schema", self.guided_json),
            "guided_regex": ("regex", self.guided_regex),
            "guided_choice": ("choice", self.guided_choice),
            "guided_grammar": ("grammar", self.guided_grammar),
        }
        given = {name: (kind, value) for name, (kind, value) in found.items() if value not in (None, ())}
        if len(given) > 1:
            raise InvalidRequest(
                list(given)[1], f"does not go with {next(iter(given))}: one of them says what is wanted"
            )
        return dict(given.values())

    def request(self, prompt: str | Sequence[int], request_id: str, logprobs: int | None) -> GenerateRequest:
        """The request to the core, for one prompt; raises InvalidRequest for an invalid response format."""
        beam_width, best_of = self.beam_width, self.best_of
        if self.use_beam_search:
            # In vLLM the width is `n`; in older versions it is `best_of`.
            beam_width, best_of = beam_width or best_of or self.n or 1, None
        return GenerateRequest(
            prompt=prompt,
            request_id=request_id,
            model=self.model or "",
            logit_bias=dict(self.logit_bias),
            logprobs=logprobs,
            best_of=best_of,
            beam_width=beam_width,
            repetition_detection=self.repetition_detection.rule() if self.repetition_detection is not None else None,
            **self._constraint(),
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            **{name: getattr(self, name) for name in _AS_THEY_CAME},
        )


_AS_THEY_CAME = frozenset(one.name for one in fields(GenerateRequest)) & Body.model_fields.keys() - {
    "best_of",
    "beam_width",
    "cache_salt",
    "logit_bias",
    "model",
    "priority",
    "repetition_detection",
    "request_id",
}
"""Fields that the request to the core has under the same name and with the same value."""


class CompletionBody(Body):
    """POST /v1/completions"""

    prompts: Prompts = Field(alias="prompt")
    logprobs: int | None = None
    echo: Literal[False] | None = None
    add_special_tokens: Literal[True] | None = None
    suffix: NotServed = None


class Message(Strict):
    """One message of a chat. Fields of our own answers are accepted while they are empty: clients send them back."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content = ""
    name: str | None = None
    refusal: NotServed = None
    annotations: NotServed = None
    audio: NotServed = None
    function_call: NotServed = None
    tool_calls: NotServed = None


class ChatPrompt(Strict):
    """Messages, and how the chat template makes a prompt of them."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True), BeforeValidator(bounded_messages)]
    chat_template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(_template_variables)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    chat_template: Annotated[str | None, BeforeValidator(_template)] = None
    documents: NotServed = None
    mm_processor_kwargs: NotServed = None
    tools: NotServed = None


class ChatBody(ChatPrompt, Body):
    """POST /v1/chat/completions"""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[Literal["text"]] | None = None
    echo: Literal[False] | None = None
    parallel_tool_calls: bool | None = None
    tool_choice: Literal["none", "auto"] | None = None
    audio: NotServed = None
    function_call: NotServed = None
    functions: NotServed = None
    prediction: NotServed = None
    reasoning_effort: NotServed = None
    verbosity: NotServed = None
    web_search_options: NotServed = None

    @property
    def num_logprobs(self) -> int | None:
        """The number of log-probabilities for the core; raises InvalidRequest for `top_logprobs` without `logprobs`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class EmbeddingBody(Strict):
    """POST /v1/embeddings"""

    inputs: Inputs = Field(alias="input")
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    truncate_prompt_tokens: Truncation = None
    dimensions: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None

    # Only these values are served.
    add_special_tokens: Literal[True] | None = None
    normalize: Literal[True] | None = None

    # Ignored: they change no answer.
    user: str | None = None

    def request(self, prompt: str | Sequence[int], request_id: str, traceparent: str = "") -> GenerateRequest:
        """The request to the core, for one input."""
        return GenerateRequest(
            prompt=prompt,
            request_id=request_id,
            model=self.model or "",
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            traceparent=traceparent,
            embeds=True,
        )


def read(kind: type[B], found: Mapping[str, Any]) -> B:
    """The body as its model; raises InvalidRequest that names the first wrong field."""
    body = read_as(kind, found)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options", "needs stream")
    return body


def read_as(kind: type[M], found: Mapping[str, Any]) -> M:
    """A client's JSON as this model; raises InvalidRequest that names the first wrong field."""
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        raise _refusal(kind, error) from None


def _refusal(kind: type[Strict], error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    place = first["loc"]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    match first["type"]:
        case "extra_forbidden":
            is_name = len(place) == 1 and len(str(place[0])) <= _MAX_NAME_CHARS
            close = get_close_matches(str(place[0]), kind.model_fields, n=1) if is_name else ()
            return InvalidRequest(_shown(field), "is unknown" + (f" (did you mean {close[0]}?)" if close else ""))
        case "missing":
            return InvalidRequest(field, "is required")
        case "value_error":
            return InvalidRequest(field, str(first["ctx"]["error"]))
        case _:
            return InvalidRequest(field, first["msg"].replace("Input should be", "must be"))


def _shown(field: str) -> str:
    return field if len(field) <= _MAX_NAME_CHARS else field[:_MAX_NAME_CHARS] + "..."
