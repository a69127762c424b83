"""The codec of calls for vectors, to Protocol Buffers and back."""

from __future__ import annotations

from baton.errors import InvalidRequest
from baton.messages.pooling import EmbedInput, EmbedRequest, EmbedResponse, EmbedResult, EmbedTask, Pooling
from baton.v1 import generation_pb2 as generation
from baton.wire.codec.derived import Codec, enum_numbers

_TASKS = enum_numbers(EmbedTask, generation.EmbedTask.DESCRIPTOR)
_TASK_OF = {number: task for task, number in _TASKS.items()} | {0: EmbedTask.EMBED}
_KINDS = enum_numbers(Pooling, generation.Pooling.DESCRIPTOR)
_KIND_OF: dict[int, Pooling | None] = {**{number: kind for kind, number in _KINDS.items()}, 0: None}
_PLAIN = ("request_id", "model", "priority", "cache_salt")
_OPTIONAL = ("normalize", "dimensions", "activate", "truncate_prompt_tokens")
EMBED_RESPONSE = Codec(EmbedResponse, generation.EmbedResponse, nested=(Codec(EmbedResult, generation.EmbedResult),))


def embed_request_to_pb(request: EmbedRequest) -> generation.EmbedRequest:
    """The message of a client's call. Raises InvalidRequest for a value that does not fit its field."""
    try:
        return generation.EmbedRequest(
            inputs=[_input_to_pb(one) for one in request.inputs],
            task=_TASKS[request.task],
            pooling=generation.POOLING_UNSPECIFIED if request.pooling is None else _KINDS[request.pooling],
            **{name: getattr(request, name) for name in (*_PLAIN, *_OPTIONAL)},
        )
    except (ValueError, TypeError) as error:  # UnicodeEncodeError is a ValueError
        raise InvalidRequest("request", str(error)) from None


def _input_to_pb(one: EmbedInput) -> generation.EmbedInput:
    if one.prompt is None or isinstance(one.prompt, str):
        return generation.EmbedInput(text=one.prompt, second_text=one.second_text)
    return generation.EmbedInput(token_ids=generation.TokenIds(ids=one.prompt), second_text=one.second_text)


def embed_request_from_pb(pb: generation.EmbedRequest) -> EmbedRequest:
    """The call in a message, unchecked. Raises InvalidRequest for a task or a pooling that this version lacks."""
    if pb.task not in _TASK_OF:
        raise InvalidRequest("task", f"this version knows no task {pb.task}")
    if pb.pooling not in _KIND_OF:
        raise InvalidRequest("pooling", f"this version knows no pooling {pb.pooling}")
    present = {name: getattr(pb, name) for name in _OPTIONAL if pb.HasField(name)}
    return EmbedRequest(
        inputs=[_input_from_pb(one) for one in pb.inputs],
        task=_TASK_OF[pb.task],
        pooling=_KIND_OF[pb.pooling],
        request_id=pb.request_id,
        model=pb.model,
        priority=pb.priority,
        cache_salt=pb.cache_salt,
        **present,
    )


def _input_from_pb(pb: generation.EmbedInput) -> EmbedInput:
    prompt: str | list[int] | None = None
    if pb.HasField("text"):
        prompt = pb.text
    elif pb.HasField("token_ids"):
        prompt = list(pb.token_ids.ids)
    return EmbedInput(prompt, pb.second_text if pb.HasField("second_text") else None)
