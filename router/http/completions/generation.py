"""The fields that completions and chats share, and the request to the core that they make."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, PlainValidator

from baton.errors import InvalidRequest
from baton.messages.generation import GenerateRequest
from baton.messages.request_limits import MAX_CHOICES
from baton.messages.sampling import RepetitionDetection
from baton.text.constraints.structural_tags import lark_of_structural_tag
from router.http.bodies.fields import (
    AllowedTokenIds,
    BadWords,
    Bounded,
    Ignored,
    LogitBias,
    NotServed,
    OnlyFalse,
    OnlyTrue,
    Positive,
    Stop,
    StopTokenIds,
    Strict,
    Truncation,
    read_as,
)

ANY_OBJECT = '{"type": "object"}'
"""The schema of the response format json_object."""
_MAX_STRUCTURES = 4096
"""More structures, or triggers of them, are longer than a structural tag may be."""
Constrained = tuple[str, "str | Sequence[str] | None"]
"""A field of the core that says what an answer must be, and its value."""


def _object_text(value: Any, kind: str) -> str | None:
    """An object of JSON as text, which is checked later; `kind`: what it is, for the error."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"must be a {kind}: an object, or its text")
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


Schema = Annotated[
    str | None,
    PlainValidator(partial(_object_text, kind="JSON schema"), json_schema_input_type=dict[str, Any] | str),
]
Pattern = Annotated[str | None, PlainValidator(_pattern, json_schema_input_type=str)]
StructuralTag = Annotated[
    str | None,
    PlainValidator(partial(_object_text, kind="structural tag"), json_schema_input_type=dict[str, Any] | str),
]
Choice = Annotated[Sequence[str], PlainValidator(_choice, json_schema_input_type=list[str])]


class JsonSchema(Strict):
    """A schema in OpenAI's wrapping. Every answer conforms to it, whether `strict` is set or not."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Strict):
    """The format that the text of an answer must have."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None
    structures: Annotated[list[Any], Bounded(_MAX_STRUCTURES)] | None = None
    triggers: Annotated[list[Any], Bounded(_MAX_STRUCTURES)] | None = None

    def as_constraint(self) -> Constrained:
        """What the text must be, with None for any text; raises InvalidRequest if type and other fields do not fit."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequest("response_format.json_schema", "and the type json_schema need each other")
        tag = self.model_dump(include={"format", "structures", "triggers"}, exclude_none=True)
        if self.type == "structural_tag":
            return "grammar", lark_of_structural_tag(json.dumps({"type": self.type, **tag}), "response_format")
        if tag:
            raise InvalidRequest(f"response_format.{next(iter(tag))}", "needs the type structural_tag")
        if self.json_schema is None:
            return "json_schema", ANY_OBJECT if self.type == "json_object" else None
        return "json_schema", json.dumps(self.json_schema.schema_)


class StructuredOutputs(Strict):
    """What the text of an answer must be, in vLLM's words."""

    json_: Schema = Field(None, alias="json")
    json_object: bool | None = None
    disable_any_whitespace: OnlyFalse = None
    disable_additional_properties: OnlyFalse = None
    disable_fallback: Ignored = None
    regex: Pattern = None
    choice: Choice = ()
    grammar: Pattern = None
    structural_tag: StructuralTag = None
    whitespace_pattern: NotServed = None

    def as_constraint(self) -> Constrained:
        """The one that is given; raises InvalidRequest unless there is exactly one."""
        given: list[Constrained] = [
            (kind, value) for kind in ("regex", "choice", "grammar") if (value := getattr(self, kind))
        ]
        given += [("json_schema", self.json_)] if self.json_ is not None else []
        given += [("json_schema", ANY_OBJECT)] if self.json_object else []
        given += [("grammar", self.structural_tag)] if self.structural_tag is not None else []
        if len(given) != 1:
            message = "must have exactly one of json, json_object: true, regex, choice, grammar and structural_tag"
            raise InvalidRequest("structured_outputs", message)
        if self.structural_tag is not None:
            return "grammar", lark_of_structural_tag(self.structural_tag, "structured_outputs.structural_tag")
        return given[0]


B = TypeVar("B", bound="GenerationBody")


class StreamOptions(Strict):
    """What a stream contains beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Ignored = None


class RepetitionBody(Strict):
    """Which repetition ends the output with an error; as in vLLM."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def rule(self) -> RepetitionDetection:
        """The rule for the engine."""
        return RepetitionDetection(self.max_pattern_size, self.min_pattern_size, self.min_count)


class GenerationBody(Strict):
    """The fields that completions and chats have in common."""

    core_names = {  # noqa: RUF012
        "request_id": ("request_id", "x-request-id"),
        "next_token_index": ("last-event-id",),
        "beam_width": ("beam_width", "use_beam_search"),
        "prompt_logprobs": ("prompt_logprobs", "logprobs"),
    }

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
    allowed_token_ids: AllowedTokenIds = ()
    bad_words: BadWords = ()
    prompt_logprobs: int | None = None
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
    speculation: bool | None = None
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

    skip_special_tokens: OnlyTrue = None
    spaces_between_special_tokens: OnlyTrue = None

    # The client's own bookkeeping, speed and cost change no answer: every prefix is cached where it can be.
    user: Ignored = None
    metadata: Ignored = None
    safety_identifier: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    cache_control: Ignored = None
    cache_prompt: Ignored = None

    kv_transfer_params: NotServed = None
    logits_processors: NotServed = None
    vllm_xargs: NotServed = None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The alternatives of which log-probabilities are wanted at each token of the prompt; None: nothing is."""
        return self.prompt_logprobs

    def check_prompt_logprobs(self) -> None:
        """Raises InvalidRequest for log-probabilities of a prompt in a stream, whose events have no place for them."""
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs", "does not go with stream")

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

    @property
    def constraint_field(self) -> str | None:
        """The field that says what the answer must be; None: any text. Raises InvalidRequest for several."""
        return next(iter(self._constraints), None)

    @cached_property
    def _constraints(self) -> Mapping[str, Constrained]:
        """What the answer must be, as a field of the core, by the field that says it: one, or none for any text.

        Raises InvalidRequest for several.
        """
        objects: Mapping[str, ResponseFormat | StructuredOutputs | None] = {
            "response_format": self.response_format,
            "structured_outputs": self.structured_outputs,
        }
        constraints: dict[str, Constrained] = {
            **{name: value.as_constraint() for name, value in objects.items() if value is not None},
            "guided_json": ("json_schema", self.guided_json),
            "guided_regex": ("regex", self.guided_regex),
            "guided_choice": ("choice", self.guided_choice),
            "guided_grammar": ("grammar", self.guided_grammar),
        }
        given = {name: (kind, value) for name, (kind, value) in constraints.items() if value not in (None, ())}
        if len(given) > 1:
            raise InvalidRequest(
                list(given)[1], f"does not go with {next(iter(given))}: one of them says what is wanted"
            )
        return given

    def request(self, prompt: str | Sequence[int], request_id: str, logprobs: int | None) -> GenerateRequest:
        """The request to the core, for one prompt; raises InvalidRequest for an invalid response format."""
        beam_width, best_of = self.beam_width, self.best_of
        constraint: dict[str, Any] = dict(self._constraints.values())
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
            prompt_logprobs=self.num_prompt_logprobs,
            repetition_detection=self.repetition_detection.rule() if self.repetition_detection is not None else None,
            **constraint,
            constraint_field=self.constraint_field or "",
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            **{name: getattr(self, name) for name in _AS_THEY_CAME},
        )


_AS_THEY_CAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "top_n_sigma",
    "seed",
    "max_tokens",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "bad_words",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "speculation",
    "length_penalty",
    "early_stopping",
    "ttft_slo_ms",
    "tpot_slo_ms",
)
"""Fields that the request to the core has under the same name and with the same value."""


def read_generation(kind: type[B], parsed: Mapping[str, Any]) -> B:
    """The body as its model; raises InvalidRequest that names the first wrong field."""
    body = read_as(kind, parsed)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options", "needs stream")
    return body
