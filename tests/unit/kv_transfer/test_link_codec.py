"""The link's messages are the same after encoding and decoding, and unknown ones are read as None."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import Message

from baton.engine.runner import KVLayout
from baton.errors import TransferCause, TransferFailed
from baton.messages.ids import AttemptKey
from baton.messages.node_report import ProbeFault
from baton.messages.sampling import TokenLogprobs
from baton.v1 import kv_link_pb2
from kv_transfer.backends.base import PeerMemory
from kv_transfer.layout import LayoutFingerprint, LinkIdentity, PeerNode
from kv_transfer.link import link_codec
from kv_transfer.link.link_messages import (
    Abandon,
    AskProbe,
    Begun,
    Closing,
    ConfirmPart,
    ConfirmRead,
    Expect,
    Heartbeat,
    LinkHello,
    LinkWelcome,
    MemoryPart,
    Offer,
    OfferLost,
    PartConfirmed,
    ProbeReady,
    ProbeResult,
    ReadConfirmed,
    ReaderMessage,
    ReadProgress,
    SenderMessage,
    Subscribe,
    sender_of,
    welcome_of,
)

A = AttemptKey("req-1", 3, 2**63 + 5)
LAYOUT = LayoutFingerprint("m", "cpu", "float32", 16, "2*4x(32+32)", 4096, "nixl")


@pytest.mark.parametrize(
    "message",
    [
        Expect(A),
        Subscribe(A, 4),
        ReadProgress(A, 2),
        ConfirmPart(A, 7),
        ConfirmRead(A),
        Abandon(A, True),
        Abandon(A, False),
        Heartbeat(9),
        AskProbe(2**64 - 1),
        ProbeResult(7, 2**64 - 1),
        *(ProbeResult(7, 0, fault, "why") for fault in ProbeFault),
    ],
)
def test_reader_messages(message: ReaderMessage) -> None:
    data = link_codec.write_reader_message(message).SerializeToString()
    assert link_codec.read_reader_message(kv_link_pb2.OpenRequest.FromString(data)) == message


@pytest.mark.parametrize(
    "message",
    [
        Begun(A),
        Offer(A, 4, (1, 2**32 - 1), 10_000),
        Offer(A, 0, (), 1, Closing(17, (5,), False)),
        Offer(A, 0, (3,), 1, Closing(17, (5, 6), True)),
        Offer(A, 0, (3,), 1, Closing(17, (5,), False, (TokenLogprobs(5, -0.5, 2, [(6, -0.25), (5, -0.5)]),))),
        Offer(A, 4, (1, 0), 10_000, None, 16),
        ReadConfirmed(A, True, (2**64 - 1, 0)),
        ReadConfirmed(A, True),
        PartConfirmed(A, 4, (2**64 - 1, 0)),
        ReadConfirmed(A, False),
        ProbeReady(7, 2**32 - 1, 2**64 - 1),
        OfferLost(A, "why"),
        *(OfferLost(A, "why", cause) for cause in TransferCause),
        Heartbeat(1),
    ],
)
def test_sender_messages(message: SenderMessage) -> None:
    data = link_codec.write_sender_message(message).SerializeToString()
    assert link_codec.read_sender_message(kv_link_pb2.OpenResponse.FromString(data)) == message


def test_hello_and_welcome() -> None:
    hello = LinkHello(1, "c", "d0", "d0.x", "p0.y", LAYOUT, "host:7")
    assert link_codec.read_hello(link_codec.write_hello(hello)) == hello
    welcome = LinkWelcome("p0", "p0.y", LAYOUT, b"\x00agent", 2**63, 1000, "DRAM", 0, 1000)
    assert link_codec.read_welcome(link_codec.write_welcome(welcome)) == welcome


def test_the_parts_of_a_sender_are_in_its_welcome_and_come_back_as_its_memories() -> None:
    layout = KVLayout.uniform(16, 6, 1, 8, "float32")
    fingerprint = replace(LAYOUT, block_size=16, block_bytes=layout.block_bytes)
    first = PeerMemory("p0.y", b"\x00agent", 2**63, 1000, layout.part(range(2)).block_bytes, "DRAM", 0, 4, 16, range(2))
    second = replace(
        first,
        incarnation="p0.y/1",
        agent_metadata=b"other",
        base_address=4096,
        block_bytes=layout.part(range(2, 6)).block_bytes,
        kind="VRAM",
        device_id=3,
        layers=range(2, 6),
    )
    sender = PeerNode("p0.y", (first, second))
    welcome = welcome_of(LinkIdentity("c", "p0", "p0.y", fingerprint), sender, 1000)
    read = link_codec.read_welcome(link_codec.write_welcome(welcome))
    assert read is not None
    # The reader's blocks have another size.
    assert sender_of(read, replace(layout, block_size=64)) == sender


@pytest.mark.parametrize("layers", [range(5, 9), range(7, 7), range((1 << 32) - 1)])
def test_layers_that_no_model_has_are_left_to_the_mover_to_refuse(layers: range) -> None:
    layout = KVLayout.uniform(16, 6, 1, 8, "float32")
    welcome = LinkWelcome("p0", "p0.y", LAYOUT, b"agent", 1, 1000, "DRAM", 0, 1000, 0, layers)
    read = link_codec.read_welcome(
        link_codec.write_welcome(replace(welcome, other_parts=[MemoryPart(layers, b"x", 1, "DRAM", 0)]))
    )
    assert read is not None
    with pytest.raises(TransferFailed, match="once and in order"):
        sender_of(read, layout).layers_of_parts(6)


@pytest.mark.parametrize("request_id", ["", "x" * 65, "a b", "a\0", "ä", "a\n"])
def test_a_message_with_an_invalid_request_id_is_read_as_none(request_id: str) -> None:
    odd = A._replace(request_id=request_id)
    for message in (
        Expect(odd),
        Subscribe(odd, 0),
        ConfirmRead(odd),
        Abandon(odd, True),
        ReadProgress(odd, 1),
        ConfirmPart(odd, 1),
    ):
        assert link_codec.read_reader_message(link_codec.write_reader_message(message)) is None


def test_an_unknown_message_is_read_as_none() -> None:
    assert link_codec.read_reader_message(kv_link_pb2.OpenRequest()) is None
    assert link_codec.read_sender_message(kv_link_pb2.OpenResponse()) is None
    assert link_codec.read_hello(kv_link_pb2.OpenRequest()) is None
    assert link_codec.read_welcome(kv_link_pb2.OpenResponse()) is None
    assert link_codec.read_reader_message(link_codec.write_hello(LinkHello(1, "", "", "", "", LAYOUT))) is None


@pytest.mark.parametrize(
    ("envelope", "read", "greeting"),
    [
        (kv_link_pb2.OpenRequest, link_codec.read_reader_message, "hello"),
        (kv_link_pb2.OpenResponse, link_codec.read_sender_message, "welcome"),
    ],
)
def test_each_message_of_the_protocol_is_known(
    envelope: type[Message], read: Callable[[Any], object], greeting: str
) -> None:
    for field in envelope.DESCRIPTOR.oneofs_by_name["message"].fields:
        message = envelope(**{field.name: {}})
        part = getattr(message, field.name)
        assert field.message_type is not None
        if "attempt" in field.message_type.fields_by_name:
            part.attempt.request_id = "req-1"
        assert (read(message) is None) == (field.name == greeting)


def test_a_fault_of_a_newer_version_is_one_all_the_same() -> None:
    message = link_codec.write_reader_message(ProbeResult(7, 0, ProbeFault.TIMED_OUT, "why"))
    message.probe_result.fault = 99  # type: ignore[assignment]
    assert link_codec.read_reader_message(message) == ProbeResult(7, 0, ProbeFault.READ_FAILED, "why")
