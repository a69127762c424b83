"""Codecs derived from fields: a field that is missing in the class or in the message is refused."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

import pytest
from google.protobuf.message import Message

from baton.errors import InvalidRequest, TransferCause
from baton.messages.ids import AttemptKey
from baton.messages.node import FINISH_REASONS, Abort, Leg, Outcome, RequestDelta, Role, StepReport, WatchKVCache
from baton.messages.node_report import HandoffSide, OpenHandoff
from baton.messages.sampling import RepetitionDetection, SamplingParams
from baton.v1 import generation_pb2, node_pb2
from baton.wire.codec.derived import Codec, FieldConversion, OneOfCodec, enum_numbers

MESSAGE_ONLY = ("stop", "best_of", "include_stop_str_in_output", "bad_words")
WORDS = FieldConversion("bad_words_token_ids", write=list, read=tuple)
"""Sequences of sequences have no derived conversion."""


@dataclass(frozen=True)
class Pattern:
    """Has the fields of generation.RepetitionDetection, and a conversion that is not derived."""

    max_pattern_size: int
    min_pattern_size: int
    min_count: int


@dataclass(frozen=True)
class Smaller:
    max_pattern_size: int
    min_pattern_size: int


@dataclass(frozen=True)
class Counted:
    """Has the same fields, some of them in a class of their own."""

    sizes: Smaller
    min_count: int


@dataclass(frozen=True)
class Larger:
    max_pattern_size: int
    min_pattern_size: int
    min_count: int
    seed: int = 0


@dataclass(frozen=True)
class Untyped:
    max_pattern_size: object
    min_pattern_size: int
    min_count: int


@pytest.mark.parametrize(
    ("members", "pb"),
    [
        (Outcome, node_pb2.Outcome),
        (FINISH_REASONS, generation_pb2.FinishReason),
        (Leg, node_pb2.Leg),
        ((Role.PREFILL, Role.DECODE, Role.ENCODE), node_pb2.Role),
        (TransferCause, node_pb2.TransferCause),
        (HandoffSide, node_pb2.HandoffSide),
    ],
    ids=["Outcome", "FinishReason", "Leg", "Role", "TransferCause", "HandoffSide"],
)
def test_each_member_has_a_number_and_each_number_but_zero_a_member(members: Collection[enum.Enum], pb: Any) -> None:
    assert sorted(enum_numbers(members, pb.DESCRIPTOR).values()) == sorted(pb.values())[1:]


def test_a_member_without_a_number_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Role lacks \['ROUTER'\]"):
        enum_numbers(Role, node_pb2.Role.DESCRIPTOR)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Smaller, r"Smaller .* lacks \['min_count'\]"),
        (Larger, r"Larger has the fields \['seed'\] that its message lacks"),
        (Untyped, r"no conversion of .*object.* can be derived for .*max_pattern_size"),
    ],
)
def test_a_class_that_does_not_fit_its_message_is_refused(kind: type[Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        Codec(kind, generation_pb2.RepetitionDetection)


def test_an_exception_for_a_field_that_is_not_there_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Pattern has no fields \['size'\]"):
        Codec(Pattern, generation_pb2.RepetitionDetection, FieldConversion("size"))


def test_a_field_that_the_class_lacks_may_be_left_unread() -> None:
    codec = Codec(Smaller, generation_pb2.RepetitionDetection, message_only=("min_count",))
    assert codec.from_pb(generation_pb2.RepetitionDetection(max_pattern_size=3, min_count=9)) == Smaller(3, 0)


def test_the_fields_of_an_inlined_class_are_fields_of_the_message() -> None:
    message = generation_pb2.RepetitionDetection
    inlined = {"sizes": Codec(Smaller, message, is_inlined=True)}
    codec = Codec(Counted, message, inlined=inlined)
    pb = codec.to_pb(Counted(Smaller(3, 1), 2))
    assert pb == message(max_pattern_size=3, min_pattern_size=1, min_count=2)
    assert codec.from_pb(pb) == Counted(Smaller(3, 1), 2)


def test_an_exception_replaces_the_direction_that_it_names() -> None:
    codec = Codec(
        Pattern, generation_pb2.RepetitionDetection, FieldConversion("min_count", read=lambda count: count or 2)
    )
    assert codec.from_pb(codec.to_pb(Pattern(3, 1, 0))) == Pattern(3, 1, 2)


def test_an_absent_field_that_cannot_be_none_has_its_default() -> None:
    codec = Codec(SamplingParams, generation_pb2.SamplingParams, WORDS, message_only=MESSAGE_ONLY)
    assert codec.from_pb(generation_pb2.SamplingParams()) == SamplingParams()


def test_a_nested_class_takes_the_codec_that_is_named_for_it() -> None:
    part = Codec(
        RepetitionDetection, generation_pb2.RepetitionDetection, FieldConversion("min_count", read=lambda count: 7)
    )
    codec = Codec(
        SamplingParams,
        generation_pb2.SamplingParams,
        WORDS,
        nested=(part,),
        message_only=MESSAGE_ONLY,
    )
    params = SamplingParams(repetition_detection=RepetitionDetection(3, 1, 2))
    assert codec.from_pb(codec.to_pb(params)).repetition_detection == RepetitionDetection(3, 1, 7)


def test_an_enum_of_a_newer_version_is_refused_by_name() -> None:
    codec = Codec(OpenHandoff, node_pb2.OpenHandoff)
    with pytest.raises(InvalidRequest, match="side"):
        codec.from_pb(node_pb2.OpenHandoff(side=99))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "message", "of_the_stream"),
    [
        (RequestDelta, node_pb2.RequestDelta, set()),
        (StepReport, node_pb2.StepReport, {"next_places", "next_token_ids"}),
    ],
)
def test_hand_written_codecs_have_all_fields_too(
    kind: type[Any], message: type[Message], of_the_stream: set[str]
) -> None:
    """`of_the_stream`: fields in which `report_stream` puts tokens that need no delta of their own."""
    assert {field.name for field in fields(kind)} | of_the_stream == set(message.DESCRIPTOR.fields_by_name)


def test_a_oneof_is_decoded_as_the_class_of_its_field() -> None:
    codec: OneOfCodec[Any, Any] = OneOfCodec(
        node_pb2.AttachRequest, Codec(Abort, node_pb2.Abort), Codec(WatchKVCache, node_pb2.WatchKVCache)
    )
    for value in (Abort(AttemptKey("r", 1), "cancelled"), WatchKVCache()):
        assert codec.from_pb(codec.to_pb(value)) == value
    assert codec.from_pb(node_pb2.AttachRequest(submit=node_pb2.Submit())) is None
    assert codec.from_pb(node_pb2.AttachRequest()) is None


def test_a_class_without_a_field_in_the_oneof_is_refused() -> None:
    with pytest.raises(TypeError, match="AttachRequest has no field for OpenHandoff"):
        OneOfCodec(node_pb2.AttachRequest, Codec(OpenHandoff, node_pb2.OpenHandoff))
