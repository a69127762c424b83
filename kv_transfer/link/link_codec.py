"""The link's messages as Protocol Buffers and back. Reading checks shapes only; what numbers mean is for the books."""

from __future__ import annotations

from baton.errors import TransferCause
from baton.messages.ids import SCOPED_ID_PATTERN
from baton.v1 import kv_link_pb2
from baton.wire.codec.node import attempt_from_pb, attempt_to_pb, transfer_cause_from_pb, transfer_cause_to_pb
from baton.wire.codec.sampling import logprobs_from_pb, logprobs_to_pb
from kv_transfer.layout import LayoutFingerprint
from kv_transfer.link.link_messages import (
    Abandon,
    Begun,
    Closing,
    ConfirmPart,
    ConfirmRead,
    Expect,
    Heartbeat,
    LinkHello,
    LinkWelcome,
    Offer,
    OfferLost,
    PartConfirmed,
    ReadConfirmed,
    ReaderMessage,
    ReadProgress,
    SenderMessage,
    Subscribe,
    request_of,
)


def write_reader_message(message: ReaderMessage) -> kv_link_pb2.OpenRequest:
    """A decode node's message after its hello."""
    match message:
        case Expect(attempt):
            return kv_link_pb2.OpenRequest(expect=kv_link_pb2.Expect(attempt=attempt_to_pb(attempt)))
        case Subscribe(attempt, first_block):
            body = kv_link_pb2.Subscribe(attempt=attempt_to_pb(attempt), first_block=first_block)
            return kv_link_pb2.OpenRequest(subscribe=body)
        case ReadProgress(attempt, blocks_read):
            progress = kv_link_pb2.ReadProgress(attempt=attempt_to_pb(attempt), blocks_read=blocks_read)
            return kv_link_pb2.OpenRequest(read_progress=progress)
        case ConfirmRead(attempt):
            return kv_link_pb2.OpenRequest(confirm_read=kv_link_pb2.ConfirmRead(attempt=attempt_to_pb(attempt)))
        case ConfirmPart(attempt, end_block):
            part = kv_link_pb2.ConfirmPart(attempt=attempt_to_pb(attempt), end_block=end_block)
            return kv_link_pb2.OpenRequest(confirm_part=part)
        case Abandon(attempt, reads_in_flight):
            abandon = kv_link_pb2.Abandon(attempt=attempt_to_pb(attempt), reads_in_flight=reads_in_flight)
            return kv_link_pb2.OpenRequest(abandon=abandon)
        case Heartbeat(seq):
            return kv_link_pb2.OpenRequest(heartbeat=kv_link_pb2.Heartbeat(seq=seq))


def read_reader_message(request: kv_link_pb2.OpenRequest) -> ReaderMessage | None:
    """None for a message that is unknown here, that has no place after the hello, or about what can be no request."""
    message = _reader_message(request)
    return message if isinstance(message, Heartbeat) or _is_sound(message) else None


def _is_sound(message: ReaderMessage | None) -> bool:
    """Senders remember what readers ask for, and a name of any length would be remembered at that length."""
    return message is not None and SCOPED_ID_PATTERN.match(request_of(message)) is not None


def _reader_message(request: kv_link_pb2.OpenRequest) -> ReaderMessage | None:
    match request.WhichOneof("message"):
        case "expect":
            return Expect(attempt_from_pb(request.expect.attempt))
        case "subscribe":
            return Subscribe(attempt_from_pb(request.subscribe.attempt), request.subscribe.first_block)
        case "read_progress":
            return ReadProgress(attempt_from_pb(request.read_progress.attempt), request.read_progress.blocks_read)
        case "confirm_read":
            return ConfirmRead(attempt_from_pb(request.confirm_read.attempt))
        case "confirm_part":
            return ConfirmPart(attempt_from_pb(request.confirm_part.attempt), request.confirm_part.end_block)
        case "abandon":
            return Abandon(attempt_from_pb(request.abandon.attempt), request.abandon.reads_in_flight)
        case "heartbeat":
            return Heartbeat(request.heartbeat.seq)
        case _:
            return None


def write_sender_message(message: SenderMessage) -> kv_link_pb2.OpenResponse:
    """A prefill node's message after its welcome."""
    match message:
        case Begun(attempt):
            return kv_link_pb2.OpenResponse(begun=kv_link_pb2.Begun(attempt=attempt_to_pb(attempt)))
        case Offer():
            return kv_link_pb2.OpenResponse(offer=_offer_pb(message))
        case ReadConfirmed(attempt, held, digests):
            confirmed = kv_link_pb2.ReadConfirmed(attempt=attempt_to_pb(attempt), held=held, digests=digests)
            return kv_link_pb2.OpenResponse(read_confirmed=confirmed)
        case PartConfirmed(attempt, first_block, digests):
            part = kv_link_pb2.PartConfirmed(attempt=attempt_to_pb(attempt), first_block=first_block, digests=digests)
            return kv_link_pb2.OpenResponse(part_confirmed=part)
        case OfferLost(attempt, story, cause):
            lost = kv_link_pb2.OfferLost(attempt=attempt_to_pb(attempt), story=story, cause=transfer_cause_to_pb(cause))
            return kv_link_pb2.OpenResponse(offer_lost=lost)
        case Heartbeat(seq):
            return kv_link_pb2.OpenResponse(heartbeat=kv_link_pb2.Heartbeat(seq=seq))


def read_sender_message(response: kv_link_pb2.OpenResponse) -> SenderMessage | None:
    """None for a message that is unknown here, or that has no place after the welcome."""
    match response.WhichOneof("message"):
        case "begun":
            return Begun(attempt_from_pb(response.begun.attempt))
        case "offer":
            return _offer(response.offer)
        case "read_confirmed":
            answer = response.read_confirmed
            return ReadConfirmed(attempt_from_pb(answer.attempt), answer.held, tuple(answer.digests))
        case "part_confirmed":
            part = response.part_confirmed
            return PartConfirmed(attempt_from_pb(part.attempt), part.first_block, tuple(part.digests))
        case "offer_lost":
            lost = response.offer_lost
            cause = transfer_cause_from_pb(lost.cause) or TransferCause.LEASE_LOST
            return OfferLost(attempt_from_pb(lost.attempt), lost.story, cause)
        case "heartbeat":
            return Heartbeat(response.heartbeat.seq)
        case _:
            return None


def write_hello(hello: LinkHello) -> kv_link_pb2.OpenRequest:
    """The decode node's first message."""
    body = kv_link_pb2.LinkHello(
        protocol_version=hello.protocol_version,
        cluster=hello.cluster,
        node_id=hello.node_id,
        incarnation=hello.incarnation,
        peer_incarnation=hello.peer_incarnation,
        layout=_layout_pb(hello.layout),
        address=hello.address,
    )
    return kv_link_pb2.OpenRequest(hello=body)


def read_hello(request: kv_link_pb2.OpenRequest) -> LinkHello | None:
    """None for anything but a hello."""
    if not request.HasField("hello"):
        return None
    hello = request.hello
    return LinkHello(
        protocol_version=hello.protocol_version,
        cluster=hello.cluster,
        node_id=hello.node_id,
        incarnation=hello.incarnation,
        peer_incarnation=hello.peer_incarnation,
        layout=_layout(hello.layout),
        address=hello.address,
    )


def write_welcome(welcome: LinkWelcome) -> kv_link_pb2.OpenResponse:
    """The prefill node's first message."""
    body = kv_link_pb2.LinkWelcome(
        node_id=welcome.node_id,
        incarnation=welcome.incarnation,
        layout=_layout_pb(welcome.layout),
        agent_metadata=welcome.agent_metadata,
        base_address=welcome.base_address,
        num_blocks=welcome.num_blocks,
        memory_kind=welcome.memory_kind,
        device_id=welcome.device_id,
        heartbeat_ms=welcome.heartbeat_ms,
    )
    return kv_link_pb2.OpenResponse(welcome=body)


def read_welcome(response: kv_link_pb2.OpenResponse) -> LinkWelcome | None:
    """None for anything but a welcome."""
    if not response.HasField("welcome"):
        return None
    welcome = response.welcome
    return LinkWelcome(
        node_id=welcome.node_id,
        incarnation=welcome.incarnation,
        layout=_layout(welcome.layout),
        agent_metadata=welcome.agent_metadata,
        base_address=welcome.base_address,
        num_blocks=welcome.num_blocks,
        memory_kind=welcome.memory_kind,
        device_id=welcome.device_id,
        heartbeat_ms=welcome.heartbeat_ms,
    )


def _offer_pb(offer: Offer) -> kv_link_pb2.Offer:
    closing = None
    if offer.closing is not None:
        closing = kv_link_pb2.Closing(
            num_prompt_tokens=offer.closing.num_prompt_tokens,
            first_token_ids=offer.closing.first_token_ids,
            ended=offer.closing.ended,
            first_logprobs=logprobs_to_pb(offer.closing.first_logprobs),
        )
    return kv_link_pb2.Offer(
        attempt=attempt_to_pb(offer.attempt),
        first_block=offer.first_block,
        block_ids=offer.block_ids,
        lease_ms=offer.lease_ms,
        closing=closing,
        digest_every=offer.digest_every,
    )


def _offer(offer: kv_link_pb2.Offer) -> Offer:
    closing = None
    if offer.HasField("closing"):
        read = offer.closing
        first_logprobs = tuple(logprobs_from_pb(read.first_logprobs))
        closing = Closing(read.num_prompt_tokens, tuple(read.first_token_ids), read.ended, first_logprobs)
    block_ids = tuple(offer.block_ids)
    return Offer(
        attempt_from_pb(offer.attempt), offer.first_block, block_ids, offer.lease_ms, closing, offer.digest_every
    )


def _layout_pb(layout: LayoutFingerprint) -> kv_link_pb2.KvLayout:
    return kv_link_pb2.KvLayout(
        model_fingerprint=layout.model_fingerprint,
        numerics=layout.numerics,
        dtype=layout.dtype,
        block_size=layout.block_size,
        geometry=layout.geometry,
        block_bytes=layout.block_bytes,
        backend=layout.backend,
    )


def _layout(layout: kv_link_pb2.KvLayout) -> LayoutFingerprint:
    return LayoutFingerprint(
        model_fingerprint=layout.model_fingerprint,
        numerics=layout.numerics,
        dtype=layout.dtype,
        block_size=layout.block_size,
        geometry=layout.geometry,
        block_bytes=layout.block_bytes,
        backend=layout.backend,
    )
