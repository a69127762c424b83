"""The sending and the receiving half of a hand-off in one process: a real link, real bytes, faked one-sided reads."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grpc
import torch

from baton.clock import SystemClock
from baton.engine.connector import KVTransferOutput, LostKV, Pin
from baton.engine.request import Request, RequestStatus
from baton.engine.runner import PROBE_BLOCKS, KVLayout, KVMemory
from baton.messages.ids import AttemptKey, Peer
from baton.messages.node import Leg, Outcome
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.node.kv.intake import Intake
from baton.node.kv.intake_connector import IntakeConnector
from baton.node.kv.offer_connector import OfferConnector
from baton.node.kv.offering import Offering
from baton.runner.blocks.block_digests import block_digests
from baton.runner.blocks.sub_blocks import WHOLE, Division
from baton.wire.liveness import DIRECT
from kv_transfer.backends.base import ReadHandle, TransferBackend
from kv_transfer.layout import LayoutFingerprint, LinkIdentity
from kv_transfer.link.link_messages import ConfirmRead, Heartbeat, ReaderMessage
from kv_transfer.mover.mover import Mover
from kv_transfer.mover.part_mover import DeliverEvent
from kv_transfer.mover.parts_mover import OwnPart, PartsMover
from kv_transfer.piece_plan import ReadRange
from kv_transfer.receiver.join_probe import JoinProbes
from kv_transfer.receiver.probe_values import ProbeState, ProbeTimes
from kv_transfer.receiver.transfer import TransferBook
from kv_transfer.sender.lease_values import LeaseTimes
from tests.doubles.fake_clock import FakeClock
from tests.doubles.fake_transfer_backend import FakeTransferBackend, FakeTransferFabric

BLOCK_SIZE = 4
BLOCK_BYTES = 64
NUM_BLOCKS = 1280
VOCAB_SIZE = 1000
KEY = "req#1"
ATTEMPT = AttemptKey("req", 1)
NUM_TOKENS = 18
"""The length of the prompt of that attempt, which has five blocks."""
THEIRS = [5, 6, 7, 20, 21]
"""Its blocks on the sender."""
OURS = [40, 41, 42, 43, 10]
"""The blocks for it on the receiver."""
HEARTBEAT_S = 0.05
WITHIN_S = 20.0
KV_LAYOUT = KVLayout.uniform(BLOCK_SIZE, num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32")
LAYOUT = LayoutFingerprint("model-1", "cpu-1", "float32", BLOCK_SIZE, "1*1x(2+2)", BLOCK_BYTES, "memory")


def new_memory() -> KVMemory:
    """Zeroed host memory of NUM_BLOCKS blocks."""
    buffer = (ctypes.c_char * ((NUM_BLOCKS + PROBE_BLOCKS) * BLOCK_BYTES))()
    return KVMemory(ctypes.addressof(buffer), NUM_BLOCKS, BLOCK_BYTES, "DRAM", 0, buffer, PROBE_BLOCKS)


def new_device_memory() -> KVMemory:
    """Zeroed memory that claims to be on a device: its blocks are accessible only as a tensor."""
    tensor = torch.zeros((NUM_BLOCKS + PROBE_BLOCKS) * BLOCK_BYTES, dtype=torch.uint8)
    return KVMemory(tensor.data_ptr(), NUM_BLOCKS, BLOCK_BYTES, "VRAM", 0, tensor, PROBE_BLOCKS)


def write_block(memory: KVMemory, block: int, content: bytes) -> None:
    ctypes.memmove(memory.base_address + block * BLOCK_BYTES, content, BLOCK_BYTES)


def read_block(memory: KVMemory, block: int) -> bytes:
    return ctypes.string_at(memory.base_address + block * BLOCK_BYTES, BLOCK_BYTES)


def content_of(request_id: str, index: int) -> bytes:
    """Return the content of prompt block `index` of a request."""
    return (f"{request_id}/{index};".encode() * BLOCK_BYTES)[:BLOCK_BYTES]


@dataclass
class Recorder:
    """Records what one half reports to its engine and its event log, and waits for it."""

    arrived: dict[str, tuple[int, ...]] = field(default_factory=dict)
    failed: dict[str, LostKV] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    pins: list[Pin] = field(default_factory=list)
    moves_ended: list[AttemptKey] = field(default_factory=list)
    num_told: int = 0
    """How often anything was told to the engine, which wakes it."""
    events: list[tuple[str, str, int, str]] = field(default_factory=list)
    reads_posted: int = 0
    heartbeats: int = 0
    has_confirm_read: bool = False
    """Whether a reader has asked if its lease was held."""
    dropped_peers: list[str] = field(default_factory=list)
    is_peer_running: bool = False
    """The answer to the question whether the process of a silent peer runs."""
    probed_addresses: list[str] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.on_loop = asyncio.get_running_loop().call_soon_threadsafe

    def tell_engine(self, news: KVTransferOutput) -> None:
        self.arrived.update({key: tuple(kv.first_token_ids) for key, kv in news.arrived.items()})
        self.failed.update(news.failed)
        self.released.extend(news.released)
        self.pins.extend(news.pins)
        self.moves_ended.extend(news.moves_ended)
        self.num_told += 1
        self._changed.set()

    def record(self, name: str, attempt: AttemptKey, value: int, detail: str) -> None:
        self.events.append((name, str(attempt), value, detail))
        self._changed.set()

    async def is_running(self, address: str, within_s: float) -> bool:
        self.probed_addresses.append(address)
        return self.is_peer_running

    def names(self, key: str) -> list[str]:
        return [name for name, attempt, _, _ in self.events if attempt == key]

    def on_message(self, message: ReaderMessage) -> None:
        self.heartbeats += isinstance(message, Heartbeat)
        self.has_confirm_read = self.has_confirm_read or isinstance(message, ConfirmRead)
        self._changed.set()

    def on_read_posted(self) -> None:
        self.reads_posted += 1
        self._changed.set()

    def on_peer_dropped(self, incarnation: str) -> None:
        self.dropped_peers.append(incarnation)
        self._changed.set()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return when the condition holds; it is evaluated whenever something was recorded."""
        async with asyncio.timeout(WITHIN_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def wait_for_event(self, name: str, key: str = KEY, value: int | None = None) -> None:
        """Return once there is such an event of the attempt, with this value if one is given."""
        await self.wait_until(
            lambda: any(event[:2] == (name, key) and value in (None, event[2]) for event in self.events)
        )

    async def arrival(self, key: str = KEY) -> tuple[int, ...]:
        """Wait until the KV has arrived; return the first tokens that came with it."""
        await self.wait_until(lambda: key in self.arrived)
        return self.arrived[key]

    async def failure(self, key: str = KEY) -> LostKV:
        """Wait until the transfer has failed, and return why."""
        await self.wait_until(lambda: key in self.failed)
        return self.failed[key]

    async def release(self, key: str = KEY) -> None:
        """Wait until the blocks of this attempt, and of no other one, were released."""
        await self.wait_until(lambda: self.released == [key])


MakeBackend = Callable[[str, KVMemory, Recorder], TransferBackend]
"""Makes the transfer backend of an incarnation over this memory; called in the mover's thread."""


def mover_of_one_part(
    memory: KVMemory, make_mover: Callable[[DeliverEvent], Mover], deliver: DeliverEvent
) -> PartsMover:
    """The mover of a node whose memory is in one part."""
    layers = range(memory.layout.num_layers if memory.layout is not None else 1)
    return PartsMover(memory.layout, [OwnPart(layers, make_mover)], deliver)


class RecordingOffering(Offering):
    """A hand-off that records the messages that it receives, so that a test can wait for them."""

    def __init__(self, *args: Any, recorder: Recorder, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recorder = recorder

    def link_received(self, link: int, message: ReaderMessage) -> None:
        super().link_received(link, message)
        self._recorder.on_message(message)


class GatedDigests:
    """Computes the digests of blocks, and waits for its gate to be open first."""

    def __init__(self, memory: KVMemory) -> None:
        self._digests = block_digests(memory)
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, ids: Sequence[int], division: Division = WHOLE, /) -> Sequence[int]:
        self.gate.wait(WITHIN_S)
        return self._digests(ids, division)


class SenderHalf:
    """A prefill node without an engine: the test plays the engine."""

    def __init__(
        self,
        make_backend: MakeBackend,
        identity: LinkIdentity,
        clock: FakeClock,
        memory: KVMemory | None = None,
        digest_every: int = 1,
    ) -> None:
        self.identity = identity
        self.memory = memory or new_memory()
        self.recorder = Recorder()
        self._make_backend = make_backend
        self.handoff = RecordingOffering(
            identity,
            self.memory,
            partial(mover_of_one_part, self.memory, self._make_mover),
            self.recorder.tell_engine,
            self.recorder.record,
            clock,
            heartbeat_s=HEARTBEAT_S,
            recorder=self.recorder,
            digests=block_digests(self.memory),
            digest_every=digest_every,
            is_running=self.recorder.is_running,
        )
        post = asyncio.get_running_loop().call_soon_threadsafe
        self.connector = OfferConnector(self.handoff, KV_LAYOUT, post, post, lambda work: work())
        self.server = grpc.aio.server()
        self.source = Peer(identity.node_id, identity.incarnation, "")

    def _make_mover(self, deliver: DeliverEvent) -> Mover:
        name, memory, recorder = self.identity.incarnation, self.memory, self.recorder
        return Mover(lambda: self._make_backend(name, memory, recorder), deliver, SystemClock())

    async def start(self) -> None:
        await self.handoff.start()
        self.handoff.add_to_server(self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.source = replace(self.source, address=f"127.0.0.1:{port}")

    async def stop(self) -> None:
        await self.handoff.stop()
        await self.server.stop(None)

    def request(self, key: str = KEY, num_tokens: int = NUM_TOKENS) -> Request:
        spec = RequestSpec(list(range(num_tokens)), SamplingParams())
        return Request(key, spec, leg=Leg.PREFILL, attempt=attempt_of(key))

    def compute(self, request: Request, num_computed: int, block_ids: list[int] = THEIRS) -> None:
        """Write the blocks' bytes and commit a step, as an engine does."""
        for index in range(-(-num_computed // BLOCK_SIZE)):
            write_block(self.memory, block_ids[index], content_of(request.request_id, index))
        self.connector.blocks_computed(request, block_ids, num_computed)

    def finish(
        self, request: Request | None = None, block_ids: list[int] = THEIRS, outcome: Outcome = Outcome.HANDED_OFF
    ) -> Any:
        """End the request, by default a new one; a computed request ends with the first token 7."""
        request = request or self.request()
        if outcome is not Outcome.ABORTED:
            self.compute(request, request.num_prompt_tokens, block_ids)
            request.output_token_ids.append(7)
        request.status, request.outcome = RequestStatus.ENDED, outcome
        return self.connector.request_finished(request, block_ids, False)


class AnnouncingBackend(FakeTransferBackend):
    """A backend that records, on the loop, each posted read (which may write from then on) and each dropped peer."""

    def __init__(self, fabric: FakeTransferFabric, incarnation: str, memory: KVMemory, recorder: Recorder) -> None:
        super().__init__(fabric, incarnation, memory)
        self._recorder = recorder

    def post_read(self, incarnation: str, ranges: Sequence[ReadRange]) -> ReadHandle:
        handle = super().post_read(incarnation, ranges)
        if ranges[0].local_block < NUM_BLOCKS:
            self._recorder.on_loop(self._recorder.on_read_posted)
        return handle

    def disconnect(self, incarnation: str) -> None:
        super().disconnect(incarnation)
        self._recorder.on_loop(lambda: self._recorder.on_peer_dropped(incarnation))


def decode_leg(key: str, num_tokens: int, source: Peer) -> Request:
    attempt = attempt_of(key)
    return Request(
        key, RequestSpec(list(range(num_tokens)), SamplingParams()), leg=Leg.DECODE, kv_source=source, attempt=attempt
    )


def attempt_of(name: str) -> AttemptKey:
    """The attempt of a request that these tests name as engines do: REQUEST#ATTEMPT, or REQUEST#ATTEMPT@FLIGHT."""
    request_id, _, rest = name.partition("#")
    attempt, _, flight = rest.partition("@")
    return AttemptKey(request_id, int(attempt), int(flight or "0", 16))


class ReceiverHalf:
    """A decode node without an engine: the test plays the engine."""

    def __init__(
        self,
        make_backend: MakeBackend,
        identity: LinkIdentity,
        memory: KVMemory | None = None,
        digest_every: int = 1,
        keeps_valid_blocks: bool = False,
        probe_times: ProbeTimes | None = None,
    ) -> None:
        self.identity = identity
        self.memory = memory or new_memory()
        self.recorder = Recorder()
        self._make_backend = make_backend
        self.digests = GatedDigests(self.memory)
        post = asyncio.get_running_loop().call_soon_threadsafe
        self.intake = Intake(
            identity,
            partial(mover_of_one_part, self.memory, self._make_mover),
            TransferBook(digest_every=digest_every, keeps_valid_blocks=keeps_valid_blocks, vocab_size=VOCAB_SIZE),
            JoinProbes(identity.node_id, identity.incarnation, SystemClock(), probe_times),
            self.recorder.tell_engine,
            self.recorder.record,
            post,
            SystemClock(),
            replace(DIRECT, is_running=self.recorder.is_running),
            heartbeat_s=HEARTBEAT_S,
        )
        self.connector = IntakeConnector(self.intake, KV_LAYOUT, post)

    def _make_mover(self, deliver: DeliverEvent) -> Mover:
        name, memory, recorder = self.identity.incarnation, self.memory, self.recorder
        return Mover(lambda: self._make_backend(name, memory, recorder), deliver, SystemClock(), digests=self.digests)

    async def start(self) -> None:
        await self.intake.start()

    async def stop(self) -> None:
        await self.intake.stop()

    def reserve(
        self,
        source: Peer,
        key: str = KEY,
        num_tokens: int = NUM_TOKENS,
        block_ids: list[int] = OURS,
        num_local: int = 0,
    ) -> Request:
        """Reserve blocks for a decode leg whose first `num_local` tokens are cached here, as an engine does."""
        request = decode_leg(key, num_tokens, source)
        self.connector.update_state_after_alloc(request, block_ids, num_tokens - num_local)
        return request

    def finish(self, request: Request, transferring: bool = True, block_ids: list[int] = OURS) -> Any:
        request.status, request.outcome = RequestStatus.ENDED, Outcome.ABORTED
        return self.connector.request_finished(request, block_ids, transferring)


class HandoffRig:
    """One sender and one receiver. The lease and transfer books follow `clock`; links and movers run in real time."""

    def __init__(
        self,
        receiver_layout: LayoutFingerprint = LAYOUT,
        cluster: str = "c",
        make_backend: MakeBackend | None = None,
        make_memory: Callable[[], KVMemory] = new_memory,
        digest_every: int = 1,
        keeps_valid_blocks: bool = False,
        life: str = "first",
        probe_times: ProbeTimes | None = None,
        sender_layout: LayoutFingerprint = LAYOUT,
    ) -> None:
        """`life` is part of both incarnations, which name the transfer agents."""
        self.clock = FakeClock(100.0)
        self.fabric = FakeTransferFabric()
        self.make_backend = make_backend or self._fake_backend
        sender = LinkIdentity("c", "p0", f"p0.{life}", sender_layout)
        self.sender = SenderHalf(self.make_backend, sender, self.clock, make_memory(), digest_every)
        identity = LinkIdentity(cluster, "d0", f"d0.{life}", receiver_layout)
        self.receiver = ReceiverHalf(
            self.make_backend, identity, make_memory(), digest_every, keeps_valid_blocks, probe_times
        )

    def _fake_backend(self, incarnation: str, memory: KVMemory, recorder: Recorder) -> TransferBackend:
        return AnnouncingBackend(self.fabric, incarnation, memory, recorder)

    async def __aenter__(self) -> HandoffRig:
        await self.sender.start()
        await self.receiver.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.receiver.stop()
        await self.sender.stop()
        if exc[0] is None:
            assert self.receiver.intake.num_links == 0
            assert self.sender.handoff.num_links == 0
            # Tasks of gRPC may take another turn of the loop to end.
            left = asyncio.all_tasks() - {asyncio.current_task()}
            _, stay = await asyncio.wait(left, timeout=WITHIN_S) if left else ((), set())
            assert not stay, stay

    async def join(self, receiver: ReceiverHalf | None = None) -> None:
        """Return once the sender and this receiver, or the rig's own, have a link, and its probe has passed."""
        intake = (receiver or self.receiver).intake
        incarnation, probes = self.sender.identity.incarnation, intake.probes
        intake.sender_joined(self.sender.source)
        # The sender records the result of the probe, among other messages.
        await self.sender.recorder.wait_until(lambda: probes.state(incarnation) is ProbeState.PASSED)

    def reserve(
        self,
        key: str = KEY,
        num_tokens: int = NUM_TOKENS,
        block_ids: list[int] = OURS,
        num_local: int = 0,
    ) -> Request:
        """Reserve the receiver's blocks for KV of this sender, see `ReceiverHalf.reserve`."""
        return self.receiver.reserve(self.sender.source, key, num_tokens, block_ids, num_local)

    async def reading(self) -> Request:
        """Hand off a prompt whose read stays in flight; return the decode leg."""
        await self.join()
        self.freeze_reads()
        decode = self.reserve()
        self.sender.finish()
        await self.wait_for_read()
        return decode

    def pass_grace(self) -> None:
        """Let so much time go by that the sender keeps no blocks for a reader that it has lost."""
        self.clock.advance(LeaseTimes().grace_s + 1)
        self.sender.handoff.tick()

    def freeze_reads(self) -> None:
        """Reads stay in flight from now on, as from a stopped sender."""
        self.fabric.freeze(self.sender.identity.incarnation)

    async def wait_for_read(self) -> None:
        """Return once a read has been posted."""
        await self.receiver.recorder.wait_until(lambda: self.receiver.recorder.reads_posted > 0)

    def thaw_reads(self) -> None:
        self.fabric.thaw(self.sender.identity.incarnation)

    def assert_blocks(self, key: str = KEY, block_ids: list[int] = OURS, first: int = 0) -> None:
        """The receiver's blocks hold the request's KV from prompt block `first` on, and zeros before."""
        for index, block in enumerate(block_ids):
            expected = content_of(key, index) if index >= first else bytes(BLOCK_BYTES)
            assert read_block(self.receiver.memory, block) == expected, f"block {index}"
