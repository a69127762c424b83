"""The link's messages as Protocol Buffers and back. Reading checks shapes only; what numbers mean is for the books.

All codecs are derived from the fields of the classes in `link_messages` and of the messages in `kv_link.proto`.
"""

from __future__ import annotations

from baton.errors import TransferCause
from baton.messages.ids import SCOPED_ID_PATTERN
from baton.messages.node_report import ProbeFault
from baton.v1 import kv_link_pb2, node_pb2
from baton.wire.codec.derived import Codec, FieldConversion, OneOfCodec, enum_numbers
from baton.wire.codec.node import attempt_from_pb, attempt_to_pb, transfer_cause_from_pb, transfer_cause_to_pb
from baton.wire.codec.sampling import logprobs_from_pb, logprobs_to_pb
from kv_transfer.link.link_messages import (
    Abandon,
    AskProbe,
    Begun,
    Closing,
    ConfirmPart,
    ConfirmRead,
    Expect,
    Heartbeat,
    LeaseMessage,
    LinkHello,
    LinkWelcome,
    MemoryPart,
    Offer,
    OfferLost,
    PartConfirmed,
    ProbeMessage,
    ProbeReady,
    ProbeResult,
    Pull,
    ReadConfirmed,
    ReaderMessage,
    ReadProgress,
    SenderMessage,
    Subscribe,
    request_of,
)

_CLOSING = Codec(
    Closing,
    kv_link_pb2.Closing,
    FieldConversion("first_logprobs", logprobs_to_pb, lambda pbs: tuple(logprobs_from_pb(pbs))),
)
_PROBE_FAULTS = {number: fault for fault, number in enum_numbers(ProbeFault, node_pb2.ProbeFault.DESCRIPTOR).items()}
_READER_MESSAGES: OneOfCodec[ReaderMessage, kv_link_pb2.OpenRequest] = OneOfCodec(
    kv_link_pb2.OpenRequest,
    Codec(Expect, kv_link_pb2.Expect),
    Codec(Subscribe, kv_link_pb2.Subscribe),
    Codec(Pull, kv_link_pb2.Pull),
    Codec(ReadProgress, kv_link_pb2.ReadProgress),
    Codec(ConfirmRead, kv_link_pb2.ConfirmRead),
    Codec(ConfirmPart, kv_link_pb2.ConfirmPart),
    Codec(Abandon, kv_link_pb2.Abandon),
    Codec(AskProbe, kv_link_pb2.AskProbe),
    Codec(
        ProbeResult,
        kv_link_pb2.ProbeResult,
        # A fault that only a newer version knows is one all the same.
        FieldConversion("fault", read=lambda pb: _PROBE_FAULTS.get(pb, ProbeFault.READ_FAILED) if pb else None),
    ),
    Codec(Heartbeat, kv_link_pb2.Heartbeat),
)
_SENDER_MESSAGES: OneOfCodec[SenderMessage, kv_link_pb2.OpenResponse] = OneOfCodec(
    kv_link_pb2.OpenResponse,
    Codec(Begun, kv_link_pb2.Begun),
    # An offer follows each computed chunk: its attempt is converted by hand, which is faster.
    Codec(Offer, kv_link_pb2.Offer, FieldConversion("attempt", attempt_to_pb, attempt_from_pb), nested=(_CLOSING,)),
    Codec(ReadConfirmed, kv_link_pb2.ReadConfirmed),
    Codec(PartConfirmed, kv_link_pb2.PartConfirmed),
    Codec(ProbeReady, kv_link_pb2.ProbeReady),
    Codec(
        OfferLost,
        kv_link_pb2.OfferLost,
        FieldConversion(
            "cause", transfer_cause_to_pb, lambda cause: transfer_cause_from_pb(cause) or TransferCause.LEASE_LOST
        ),
    ),
    Codec(Heartbeat, kv_link_pb2.Heartbeat),
)


def _layers_to_pb(layers: range | None) -> kv_link_pb2.LayerRange | None:
    """Consecutive layers; None: all of them."""
    return None if layers is None else kv_link_pb2.LayerRange(first=layers.start, count=len(layers))


def _layers_from_pb(pb: kv_link_pb2.LayerRange) -> range:
    return range(pb.first, pb.first + pb.count)


LAYERS = FieldConversion("layers", _layers_to_pb, _layers_from_pb)
"""The conversion of a field with consecutive layers; None: all of them."""
_PART = Codec(MemoryPart, kv_link_pb2.MemoryPart, LAYERS)
_HELLO: OneOfCodec[LinkHello, kv_link_pb2.OpenRequest] = OneOfCodec(
    kv_link_pb2.OpenRequest, Codec(LinkHello, kv_link_pb2.LinkHello)
)
_WELCOME: OneOfCodec[LinkWelcome, kv_link_pb2.OpenResponse] = OneOfCodec(
    kv_link_pb2.OpenResponse, Codec(LinkWelcome, kv_link_pb2.LinkWelcome, LAYERS, nested=(_PART,))
)


def write_reader_message(message: ReaderMessage) -> kv_link_pb2.OpenRequest:
    """A decode node's message after its hello."""
    return _READER_MESSAGES.to_pb(message)


def read_reader_message(request: kv_link_pb2.OpenRequest) -> ReaderMessage | None:
    """None for a message that is unknown here, that has no place after the hello, or about what can be no request."""
    message = _READER_MESSAGES.from_pb(request)
    return message if isinstance(message, Heartbeat | ProbeMessage) or _is_sound(message) else None


def _is_sound(message: LeaseMessage | Pull | None) -> bool:
    """Senders remember what readers ask for, and a name of any length would be remembered at that length."""
    return message is not None and SCOPED_ID_PATTERN.match(request_of(message)) is not None


def write_sender_message(message: SenderMessage) -> kv_link_pb2.OpenResponse:
    """A prefill node's message after its welcome."""
    return _SENDER_MESSAGES.to_pb(message)


def read_sender_message(response: kv_link_pb2.OpenResponse) -> SenderMessage | None:
    """None for a message that is unknown here, or that has no place after the welcome."""
    return _SENDER_MESSAGES.from_pb(response)


def write_hello(hello: LinkHello) -> kv_link_pb2.OpenRequest:
    """The decode node's first message."""
    return _HELLO.to_pb(hello)


def read_hello(request: kv_link_pb2.OpenRequest) -> LinkHello | None:
    """None for anything but a hello."""
    return _HELLO.from_pb(request)


def write_welcome(welcome: LinkWelcome) -> kv_link_pb2.OpenResponse:
    """The prefill node's first message."""
    return _WELCOME.to_pb(welcome)


def read_welcome(response: kv_link_pb2.OpenResponse) -> LinkWelcome | None:
    """None for anything but a welcome."""
    return _WELCOME.from_pb(response)
