"""The codec of the public service: requests and events of a stream, to Protocol Buffers and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from baton.errors import BatonError, InvalidRequest
from baton.messages.capabilities import in_order, known_capabilities
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
from baton.messages.speculation import DraftCounts
from baton.v1 import generation_pb2 as generation
from baton.wire.codec.derived import enum_numbers
from baton.wire.codec.sampling import REPETITION_DETECTION, logprobs_from_pb, logprobs_to_pb

_OPTIONAL_FIELDS = tuple(
    field.name
    for field in generation.SamplingParams.DESCRIPTOR.fields
    if field.has_presence and field.message_type is None
)
_LISTS = ("stop", "stop_token_ids", "choice", "allowed_token_ids", "bad_words")
_SERVICE_LEVEL_FIELDS = {"ttft_slo_ms": "ttft_ms", "tpot_slo_ms": "tpot_ms"}
"""Fields of `GenerateRequest`, and their names in the message `ServiceLevel`."""
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
_CALL_NUMBER_KEY = "baton-call"
_MAX_CALL_NUMBER_DIGITS = 9


def request_to_pb(request: GenerateRequest) -> generation.GenerateRequest:
    """The message of a client's request. Raises InvalidRequest for a value that does not fit its field."""
    pb = generation.GenerateRequest()
    params = pb.sampling_params
    params.SetInParent()
    for name in _OPTIONAL_FIELDS:
        if (value := getattr(request, name)) is not None:
            with _field_errors(name):
                setattr(params, name, value)
    for name in ("request_id", "model", "priority", "cache_salt"):
        with _field_errors(name):
            setattr(pb, name, getattr(request, name))
    for name, field in _SERVICE_LEVEL_FIELDS.items():
        if (value := getattr(request, name)) is not None:
            with _field_errors(name):
                setattr(pb.service_level, field, value)
    if request.repetition_detection is not None:
        with _field_errors("repetition_detection"):
            params.repetition_detection.CopyFrom(REPETITION_DETECTION.to_pb(request.repetition_detection))
    with _field_errors("logit_bias"):
        params.logit_bias.update(request.logit_bias)
    for name in _LISTS:
        with _field_errors(name):
            getattr(params, name).extend(getattr(request, name))
    with _field_errors("prompt_embeds"):
        pb.prompt_embeds.extend(
            generation.PromptEmbeds(safetensors=given.data, start=given.start) for given in request.prompt_embeds
        )
    with _field_errors("images"):
        pb.images.extend(request.images)
    with _field_errors("audio"):
        pb.audio = request.audio
    with _field_errors("prompt"):
        if isinstance(request.prompt, str):
            pb.text = request.prompt
        elif request.prompt is not None:
            pb.token_ids.ids.extend(request.prompt)
            pb.token_ids.SetInParent()
    return pb


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
    prompt: str | list[int] | None = None
    if pb.HasField("text"):
        prompt = pb.text
    elif pb.HasField("token_ids"):
        prompt = list(pb.token_ids.ids)
    params = pb.sampling_params
    present = {name: getattr(params, name) for name in _OPTIONAL_FIELDS if params.HasField(name)}
    present |= {name: tuple(getattr(params, name)) for name in _LISTS}
    level = pb.service_level
    present |= {name: getattr(level, field) for name, field in _SERVICE_LEVEL_FIELDS.items() if level.HasField(field)}
    return GenerateRequest(
        prompt=prompt,
        request_id=pb.request_id,
        model=pb.model,
        logit_bias=dict(params.logit_bias),
        priority=pb.priority,
        cache_salt=pb.cache_salt,
        repetition_detection=(
            REPETITION_DETECTION.from_pb(params.repetition_detection)
            if params.HasField("repetition_detection")
            else None
        ),
        prompt_embeds=tuple(
            [
                PromptEmbeds(given.safetensors, given.start if given.HasField("start") else None)
                for given in pb.prompt_embeds
            ]
        ),
        images=tuple(pb.images),
        audio=pb.audio,
        call=call,
        traceparent=traceparent,
        **present,
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
    found = next((value for key, value in metadata or () if key == _CALL_NUMBER_KEY), "")
    if not isinstance(found, str) or len(found) > _MAX_CALL_NUMBER_DIGITS:
        return 0
    return int(found) if found.isascii() and found.isdecimal() else 0


def path_to_metadata(finished: Finished) -> tuple[tuple[str, str], ...]:
    """The nodes that served the request, as trailing metadata, for debugging."""
    path = finished.path
    values = (path.prefill_node, path.decode_node, str(path.attempts), path.reason, str(finished.kv_bytes))
    return tuple(zip(_PATH_KEYS, map(_printable, values), strict=True))


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


def event_from_bytes(data: bytes) -> Accepted | PromptLogprobs | Chunk | SequenceFinished | generation.Finished:
    """The event in an encoded message."""
    return event_from_pb(generation.GenerateResponse.FromString(data))


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
    found = {key: value for key, value in metadata if isinstance(value, str)}
    prefill, decode, attempts, reason, kv_bytes = (found.get(key, "") for key in _PATH_KEYS)
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
    )
