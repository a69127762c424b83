"""The codec of the public service: requests, events of a stream and calls for vectors, to Protocol Buffers and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from google.protobuf.message import Message

from baton.errors import BatonError, InvalidRequest
from baton.messages.generation import (
    Accepted,
    Chunk,
    Finished,
    GenerateEvent,
    GenerateRequest,
    ModelCard,
    Path,
    PromptEmbeds,
    PromptLogprobs,
    SequenceFinished,
)
from baton.messages.node import FINISH_REASONS
from baton.messages.node_model import in_order, known_capabilities
from baton.messages.pooling import EmbedInput, EmbedRequest, EmbedResponse, EmbedResult, EmbedTask, Pooling
from baton.messages.speculation import DraftCounts
from baton.v1 import generation_pb2 as generation
from baton.wire.codec.derived import Codec, enum_numbers
from baton.wire.codec.sampling import REPETITION_DETECTION, logprobs_from_pb, logprobs_to_pb

_OPTIONAL_FIELDS = tuple(
    field.name
    for field in generation.SamplingParams.DESCRIPTOR.fields
    if field.has_presence and field.message_type is None
)
_PARAM_LISTS = ("stop", "stop_token_ids", "choice", "allowed_token_ids", "bad_words")
_LISTS = frozenset((*_PARAM_LISTS, "images"))
_REQUEST_FIELDS = ("request_id", "model", "priority", "cache_salt", "images", "audio")
_PLAIN_FIELDS = (
    ("sampling_params", {name: name for name in (*_OPTIONAL_FIELDS, *_PARAM_LISTS)}),
    ("service_level", {"ttft_ms": "ttft_slo_ms", "tpot_ms": "tpot_slo_ms"}),
    ("", {name: name for name in _REQUEST_FIELDS}),
)
"""What a message has as a `GenerateRequest` has it, for each part of the message: names there, and in the request."""
_FINISH_NUMBERS = {
    outcome.value: number
    for outcome, number in enum_numbers(FINISH_REASONS, generation.FinishReason.DESCRIPTOR).items()
}
_FINISH_NAMES = {value: name for name, value in _FINISH_NUMBERS.items()}
_PATH_KEYS = (
    "baton-prefill-node",
    "baton-decode-node",
    "baton-attempts",
    "baton-path-reason",
    "baton-kv-bytes",
)
_BIT_EXACT_KEY = "baton-bit-exact"
"""Is sent where the answer is not bit-exact, with the value `false`."""
_CALL_NUMBER_KEY = "baton-call"
_MAX_CALL_NUMBER_DIGITS = 9
_TASKS = enum_numbers(EmbedTask, generation.EmbedTask.DESCRIPTOR)
_TASK_OF = {number: task for task, number in _TASKS.items()} | {0: EmbedTask.EMBED}
_KINDS = enum_numbers(Pooling, generation.Pooling.DESCRIPTOR)
_KIND_OF: dict[int, Pooling | None] = {**{number: kind for kind, number in _KINDS.items()}, 0: None}
_EMBED_FIELDS = (
    "request_id",
    "model",
    "priority",
    "cache_salt",
    "normalize",
    "dimensions",
    "activate",
    "truncate_prompt_tokens",
)
EMBED_RESPONSE = Codec(EmbedResponse, generation.EmbedResponse, nested=(Codec(EmbedResult, generation.EmbedResult),))


def request_to_pb(request: GenerateRequest) -> generation.GenerateRequest:
    """The message of a client's request. Raises InvalidRequest for a value that does not fit its field."""
    pb = generation.GenerateRequest()
    params = pb.sampling_params
    params.SetInParent()
    for part, names in _PLAIN_FIELDS:
        message = getattr(pb, part) if part else pb
        for field, name in names.items():
            # Most fields are absent, and a context for each would take longer than all the rest.
            if (value := getattr(request, name)) is not None and value != ():
                with _field_errors(name):
                    _write(message, field, value)
    with _field_errors("logit_bias"):
        params.logit_bias.update(request.logit_bias)
    if request.repetition_detection is not None:
        with _field_errors("repetition_detection"):
            params.repetition_detection.CopyFrom(REPETITION_DETECTION.to_pb(request.repetition_detection))
    with _field_errors("prompt_embeds"):
        pb.prompt_embeds.extend(
            generation.PromptEmbeds(safetensors=given.data, start=given.start) for given in request.prompt_embeds
        )
    with _field_errors("prompt"):
        if isinstance(request.prompt, str):
            pb.text = request.prompt
        elif request.prompt is not None:
            pb.token_ids.ids.extend(request.prompt)
            pb.token_ids.SetInParent()
    return pb


def _plain_fields(pb: generation.GenerateRequest) -> dict[str, Any]:
    """The fields that are in the message as they are in a request. Absent ones have the request's defaults."""
    fields: dict[str, Any] = {}
    for part, names in _PLAIN_FIELDS:
        for field, value in (getattr(pb, part) if part else pb).ListFields():
            if (name := names.get(field.name)) is not None:
                fields[name] = tuple(value) if name in _LISTS else value
    return fields


def _write(part: Message, field: str, value: Any) -> None:
    if field in _LISTS:
        getattr(part, field).extend(value)
    else:
        setattr(part, field, value)


def _read(part: Message, field: str) -> Any:
    """The value of a field, a tuple for a list; None: it is absent."""
    if part.DESCRIPTOR.fields_by_name[field].has_presence and not part.HasField(field):
        return None
    value = getattr(part, field)
    return tuple(value) if field in _LISTS else value


def _prompt_from_pb(pb: generation.GenerateRequest | generation.EmbedInput) -> str | list[int] | None:
    if pb.HasField("text"):
        return pb.text
    return list(pb.token_ids.ids) if pb.HasField("token_ids") else None


@contextmanager
def _field_errors(field: str) -> Iterator[None]:
    """Raise protobuf's errors about a value in this context as InvalidRequest with the field's name."""
    try:
        yield
    except UnicodeEncodeError:
        raise InvalidRequest(field, "is not valid UTF-8") from None
    except (ValueError, TypeError) as error:
        raise InvalidRequest(field, str(error)) from None


def request_from_pb(pb: generation.GenerateRequest, call: int = 0, traceparent: str = "") -> GenerateRequest:
    """The request in a message, unchecked. `call` and `traceparent` come with the call, beside the message."""
    params = pb.sampling_params
    return GenerateRequest(
        prompt=_prompt_from_pb(pb),
        logit_bias=dict(params.logit_bias),
        repetition_detection=(
            REPETITION_DETECTION.from_pb(params.repetition_detection)
            if params.HasField("repetition_detection")
            else None
        ),
        prompt_embeds=tuple([PromptEmbeds(embeds.safetensors, _read(embeds, "start")) for embeds in pb.prompt_embeds]),
        call=call,
        traceparent=traceparent,
        **_plain_fields(pb),
    )


def event_to_pb(event: GenerateEvent, request_id: str) -> generation.GenerateResponse:
    """The message of one event of a stream."""
    if isinstance(event, Accepted):
        accepted = generation.Accepted(seed=event.seed, prompt_tokens=event.prompt_tokens)
        return generation.GenerateResponse(request_id=request_id, accepted=accepted)
    if isinstance(event, Chunk):
        return chunk_to_pb(event, request_id)
    if isinstance(event, PromptLogprobs):
        prompt_logprobs = generation.PromptLogprobs(positions=logprobs_to_pb(event.positions))
        return generation.GenerateResponse(request_id=request_id, prompt_logprobs=prompt_logprobs)
    if isinstance(event, SequenceFinished):
        sequence_finished = generation.SequenceFinished(
            sequence_index=event.sequence_index,
            finish_reason=_FINISH_NUMBERS[event.finish_reason],
            completion_tokens=event.completion_tokens,
        )
        _set_stop_reason(sequence_finished, event.stop_reason)
        return generation.GenerateResponse(request_id=request_id, sequence_finished=sequence_finished)
    finished = generation.Finished(
        finish_reason=_FINISH_NUMBERS[event.finish_reason],
        usage=generation.Usage(
            prompt_tokens=event.prompt_tokens,
            completion_tokens=event.completion_tokens,
            cached_tokens=event.cached_tokens,
            attempts=event.path.attempts,
            draft_tokens=event.draft_counts.num_drafted,
            accepted_draft_tokens=event.draft_counts.num_accepted,
        ),
        timings=generation.Timings(
            queue_ms=event.queue_ms,
            prefill_ms=event.prefill_ms,
            transfer_ms=event.transfer_ms,
            ttft_ms=event.ttft_ms,
            total_ms=event.total_ms,
        ),
    )
    if event.bit_exact is not None:
        finished.bit_exact = event.bit_exact
    _set_stop_reason(finished, event.stop_reason)
    return generation.GenerateResponse(request_id=request_id, finished=finished)


def chunk_to_pb(event: Chunk, request_id: str) -> generation.GenerateResponse:
    """The message of a chunk. To be fast, it copies and sets nothing without need: there is a chunk for each token."""
    response = generation.GenerateResponse(request_id=request_id)
    chunk = response.chunk
    # Setting it, even to 0, makes the response a chunk.
    chunk.first_index = event.first_index
    chunk.token_ids.extend(event.token_ids)
    chunk.text = event.text
    if event.logprobs:
        chunk.logprobs.extend(logprobs_to_pb(event.logprobs))
    if event.sequence_index:
        chunk.sequence_index = event.sequence_index
    return response


def _set_stop_reason(pb: generation.Finished | generation.SequenceFinished, stop_reason: int | str | None) -> None:
    if isinstance(stop_reason, int):
        pb.stop_token_id = stop_reason
    elif stop_reason is not None:
        pb.stop_string = stop_reason


def _stop_reason(pb: generation.Finished | generation.SequenceFinished) -> int | str | None:
    kind = pb.WhichOneof("stop_reason")
    return getattr(pb, kind) if kind else None


def call_number_to_metadata(call: int) -> tuple[tuple[str, str], ...]:
    """The client's number for a call (`GenerateRequest.call`), as metadata of the call; none for the first call.

    The number is not a field of the request, because a router of an older version refuses unknown fields and ignores
    unknown metadata.
    """
    return ((_CALL_NUMBER_KEY, str(call)),) if call > 1 else ()


def call_number_from_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> int:
    """The client's number for a call, from its metadata; 0 if there is no valid one."""
    number = next((value for key, value in metadata or () if key == _CALL_NUMBER_KEY), "")
    if not isinstance(number, str) or len(number) > _MAX_CALL_NUMBER_DIGITS:
        return 0
    return int(number) if number.isascii() and number.isdecimal() else 0


def path_to_metadata(finished: Finished) -> tuple[tuple[str, str], ...]:
    """The nodes that served the request, as trailing metadata, for debugging."""
    path = finished.path
    values = (path.prefill_node, path.decode_node, str(path.attempts), path.reason, str(finished.kv_bytes))
    named = tuple(zip(_PATH_KEYS, map(_printable, values), strict=True))
    return (*named, (_BIT_EXACT_KEY, "false")) if finished.bit_exact is False else named


def _printable(value: str) -> str:
    """The value as short printable ASCII: a call with other metadata would fail as a whole."""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in value[:200]).strip()


def response_from_bytes(data: bytes) -> generation.GenerateResponse:
    """Decode a message, without the conversion to an event."""
    return generation.GenerateResponse.FromString(data)


def event_from_pb(
    pb: generation.GenerateResponse,
) -> Accepted | PromptLogprobs | Chunk | SequenceFinished | generation.Finished:
    """The event in a message. Of the last event it returns the message: `finished_from_pb` turns it into a `Finished`
    when the trailing metadata has arrived."""
    kind = pb.WhichOneof("event")
    if kind == "accepted":
        return Accepted(pb.request_id, pb.accepted.seed, pb.accepted.prompt_tokens)
    if kind == "chunk":
        chunk = pb.chunk
        logprobs = logprobs_from_pb(chunk.logprobs)
        return Chunk(chunk.first_index, list(chunk.token_ids), chunk.text, logprobs, chunk.sequence_index)
    if kind == "prompt_logprobs":
        return PromptLogprobs(logprobs_from_pb(pb.prompt_logprobs.positions))
    if kind == "sequence_finished":
        finished = pb.sequence_finished
        reason = _FINISH_NAMES.get(finished.finish_reason, "unknown")
        return SequenceFinished(finished.sequence_index, reason, _stop_reason(finished), finished.completion_tokens)
    if kind == "finished":
        return pb.finished
    raise BatonError("the server sent an event that this client does not know: the server may be newer than the client")


def model_to_pb(card: ModelCard) -> generation.Model:
    """What a client is told of a model."""
    return generation.Model(
        name=card.name,
        max_model_len=card.max_model_len,
        vocab_size=card.vocab_size,
        capabilities=in_order(card.capabilities),
        parent=card.parent,
    )


def model_from_pb(pb: generation.Model) -> ModelCard:
    capabilities = known_capabilities(pb.capabilities)
    return ModelCard(pb.name, pb.max_model_len, pb.vocab_size, capabilities=capabilities, parent=pb.parent)


def finished_from_pb(pb: generation.Finished, metadata: Sequence[tuple[str, str | bytes]]) -> Finished:
    """The last event of a stream, with the path from the trailing metadata. Absent keys become empty."""
    metadata_values = {key: value for key, value in metadata if isinstance(value, str)}
    prefill, decode, attempts, reason, kv_bytes = (metadata_values.get(key, "") for key in _PATH_KEYS)
    return Finished(
        finish_reason=_FINISH_NAMES.get(pb.finish_reason, "unknown"),
        stop_reason=_stop_reason(pb),
        prompt_tokens=pb.usage.prompt_tokens,
        completion_tokens=pb.usage.completion_tokens,
        cached_tokens=pb.usage.cached_tokens,
        queue_ms=pb.timings.queue_ms,
        prefill_ms=pb.timings.prefill_ms,
        transfer_ms=pb.timings.transfer_ms,
        ttft_ms=pb.timings.ttft_ms,
        total_ms=pb.timings.total_ms,
        kv_bytes=int(kv_bytes or 0),
        path=Path(prefill, decode, int(attempts or 1), reason),
        draft_counts=DraftCounts(pb.usage.draft_tokens, pb.usage.accepted_draft_tokens),
        bit_exact=pb.bit_exact if pb.HasField("bit_exact") else None,
    )


def embed_request_to_pb(request: EmbedRequest) -> generation.EmbedRequest:
    """The message of a client's call. Raises InvalidRequest for a value that does not fit its field."""
    try:
        return generation.EmbedRequest(
            inputs=[_input_to_pb(item) for item in request.inputs],
            task=_TASKS[request.task],
            pooling=generation.POOLING_UNSPECIFIED if request.pooling is None else _KINDS[request.pooling],
            **{name: getattr(request, name) for name in _EMBED_FIELDS},
        )
    except (ValueError, TypeError) as error:  # UnicodeEncodeError is a ValueError
        raise InvalidRequest("request", str(error)) from None


def _input_to_pb(item: EmbedInput) -> generation.EmbedInput:
    if item.prompt is None or isinstance(item.prompt, str):
        return generation.EmbedInput(text=item.prompt, second_text=item.second_text)
    return generation.EmbedInput(token_ids=generation.TokenIds(ids=item.prompt), second_text=item.second_text)


def embed_request_from_pb(pb: generation.EmbedRequest) -> EmbedRequest:
    """The call in a message, unchecked. Raises InvalidRequest for a task or a pooling that this version lacks."""
    if pb.task not in _TASK_OF:
        raise InvalidRequest("task", f"this version knows no task {pb.task}")
    if pb.pooling not in _KIND_OF:
        raise InvalidRequest("pooling", f"this version knows no pooling {pb.pooling}")
    return EmbedRequest(
        inputs=[_input_from_pb(item) for item in pb.inputs],
        task=_TASK_OF[pb.task],
        pooling=_KIND_OF[pb.pooling],
        **{name: _read(pb, name) for name in _EMBED_FIELDS},
    )


def _input_from_pb(pb: generation.EmbedInput) -> EmbedInput:
    return EmbedInput(_prompt_from_pb(pb), _read(pb, "second_text"))
