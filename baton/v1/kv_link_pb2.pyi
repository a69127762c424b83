from baton.v1 import generation_pb2 as _generation_pb2
from baton.v1 import node_pb2 as _node_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenRequest(_message.Message):
    __slots__ = ("hello", "subscribe", "read_progress", "confirm_read", "abandon", "heartbeat", "expect", "confirm_part", "ask_probe", "probe_result", "pull")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    READ_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_READ_FIELD_NUMBER: _ClassVar[int]
    ABANDON_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    EXPECT_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_PART_FIELD_NUMBER: _ClassVar[int]
    ASK_PROBE_FIELD_NUMBER: _ClassVar[int]
    PROBE_RESULT_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    hello: LinkHello
    subscribe: Subscribe
    read_progress: ReadProgress
    confirm_read: ConfirmRead
    abandon: Abandon
    heartbeat: Heartbeat
    expect: Expect
    confirm_part: ConfirmPart
    ask_probe: AskProbe
    probe_result: ProbeResult
    pull: Pull
    def __init__(self, hello: _Optional[_Union[LinkHello, _Mapping]] = ..., subscribe: _Optional[_Union[Subscribe, _Mapping]] = ..., read_progress: _Optional[_Union[ReadProgress, _Mapping]] = ..., confirm_read: _Optional[_Union[ConfirmRead, _Mapping]] = ..., abandon: _Optional[_Union[Abandon, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., expect: _Optional[_Union[Expect, _Mapping]] = ..., confirm_part: _Optional[_Union[ConfirmPart, _Mapping]] = ..., ask_probe: _Optional[_Union[AskProbe, _Mapping]] = ..., probe_result: _Optional[_Union[ProbeResult, _Mapping]] = ..., pull: _Optional[_Union[Pull, _Mapping]] = ...) -> None: ...

class OpenResponse(_message.Message):
    __slots__ = ("welcome", "offer", "read_confirmed", "offer_lost", "heartbeat", "begun", "part_confirmed", "probe_ready")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    READ_CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    OFFER_LOST_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    PART_CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    PROBE_READY_FIELD_NUMBER: _ClassVar[int]
    welcome: LinkWelcome
    offer: Offer
    read_confirmed: ReadConfirmed
    offer_lost: OfferLost
    heartbeat: Heartbeat
    begun: Begun
    part_confirmed: PartConfirmed
    probe_ready: ProbeReady
    def __init__(self, welcome: _Optional[_Union[LinkWelcome, _Mapping]] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., read_confirmed: _Optional[_Union[ReadConfirmed, _Mapping]] = ..., offer_lost: _Optional[_Union[OfferLost, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., begun: _Optional[_Union[Begun, _Mapping]] = ..., part_confirmed: _Optional[_Union[PartConfirmed, _Mapping]] = ..., probe_ready: _Optional[_Union[ProbeReady, _Mapping]] = ...) -> None: ...

class LinkHello(_message.Message):
    __slots__ = ("protocol_version", "cluster", "node_id", "incarnation", "peer_incarnation", "layout", "address")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PEER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    cluster: str
    node_id: str
    incarnation: str
    peer_incarnation: str
    layout: KvLayout
    address: str
    def __init__(self, protocol_version: _Optional[int] = ..., cluster: _Optional[str] = ..., node_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., peer_incarnation: _Optional[str] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., address: _Optional[str] = ...) -> None: ...

class LinkWelcome(_message.Message):
    __slots__ = ("node_id", "incarnation", "layout", "agent_metadata", "base_address", "num_blocks", "memory_kind", "device_id", "heartbeat_ms", "num_probe_blocks", "layers", "other_parts", "takes_pulls")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_KIND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROBE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    OTHER_PARTS_FIELD_NUMBER: _ClassVar[int]
    TAKES_PULLS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: str
    layout: KvLayout
    agent_metadata: bytes
    base_address: int
    num_blocks: int
    memory_kind: str
    device_id: int
    heartbeat_ms: int
    num_probe_blocks: int
    layers: LayerRange
    other_parts: _containers.RepeatedCompositeFieldContainer[MemoryPart]
    takes_pulls: bool
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., agent_metadata: _Optional[bytes] = ..., base_address: _Optional[int] = ..., num_blocks: _Optional[int] = ..., memory_kind: _Optional[str] = ..., device_id: _Optional[int] = ..., heartbeat_ms: _Optional[int] = ..., num_probe_blocks: _Optional[int] = ..., layers: _Optional[_Union[LayerRange, _Mapping]] = ..., other_parts: _Optional[_Iterable[_Union[MemoryPart, _Mapping]]] = ..., takes_pulls: _Optional[bool] = ...) -> None: ...

class MemoryPart(_message.Message):
    __slots__ = ("layers", "agent_metadata", "base_address", "memory_kind", "device_id")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_KIND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    layers: LayerRange
    agent_metadata: bytes
    base_address: int
    memory_kind: str
    device_id: int
    def __init__(self, layers: _Optional[_Union[LayerRange, _Mapping]] = ..., agent_metadata: _Optional[bytes] = ..., base_address: _Optional[int] = ..., memory_kind: _Optional[str] = ..., device_id: _Optional[int] = ...) -> None: ...

class LayerRange(_message.Message):
    __slots__ = ("first", "count")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("model_fingerprint", "numerics", "dtype", "block_size", "block_bytes", "backend", "geometry", "kv_shape")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    KV_SHAPE_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    numerics: str
    dtype: str
    block_size: int
    block_bytes: int
    backend: str
    geometry: str
    kv_shape: str
    def __init__(self, model_fingerprint: _Optional[str] = ..., numerics: _Optional[str] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., block_bytes: _Optional[int] = ..., backend: _Optional[str] = ..., geometry: _Optional[str] = ..., kv_shape: _Optional[str] = ...) -> None: ...

class AskProbe(_message.Message):
    __slots__ = ("probe", "group")
    PROBE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    probe: int
    group: int
    def __init__(self, probe: _Optional[int] = ..., group: _Optional[int] = ...) -> None: ...

class ProbeReady(_message.Message):
    __slots__ = ("probe", "block", "digest")
    PROBE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    probe: int
    block: int
    digest: int
    def __init__(self, probe: _Optional[int] = ..., block: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class ProbeResult(_message.Message):
    __slots__ = ("probe", "digest", "fault", "detail")
    PROBE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    probe: int
    digest: int
    fault: _node_pb2.ProbeFault
    detail: str
    def __init__(self, probe: _Optional[int] = ..., digest: _Optional[int] = ..., fault: _Optional[_Union[_node_pb2.ProbeFault, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class Expect(_message.Message):
    __slots__ = ("attempt",)
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attempt: _node_pb2.Attempt
    def __init__(self, attempt: _Optional[_Union[_node_pb2.Attempt, _Mapping]] = ...) -> None: ...

class Begun(_message.Message):
    __slots__ = ("attempt", "num_tokens")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt: _node_pb2.Attempt
    num_tokens: int
    def __init__(self, attempt: _Optional[_Union[_node_pb2.Attempt, _Mapping]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Subscribe(_message.Message):
    __slots__ = ("attempt", "first_block")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    attempt: _node_pb2.Attempt
    first_block: int
    def __init__(self, attempt: _Optional[_Union[_node_pb2.Attempt, _Mapping]] = ..., first_block: _Optional[int] = ...) -> None: ...

class Pull(_message.Message):
    __slots__ = ("attempt", "keys")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    attempt: _node_pb2.Attempt
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, attempt: _Optional[_Union[_node_pb2.Attempt, _Mapping]] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("attempt", "first_block", "block_ids", "lease_ms", "closing", "digest_every", "digest_parts")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    DIGEST_EVERY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_PARTS_FIELD_NUMBER: _ClassVar[int]
    attempt: _node_pb2.Attempt
    first_block: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    lease_ms: int
    closing: Closing
    digest_every: int
    digest_parts: int
    def __init__(self, attempt: _Optional[_Union[_node_pb2.Attempt, _Mapping]] = ..., first_block: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., lease_ms: _Optional[int] = ..., closing: _Optional[_Union[Closing, _Mapping]] = ..., digest_every: _Optional[int] = ..., digest_parts: _Optional[int] = ...) -> None: ...

class Closing(_message.Message):
    __slots__ = ("num_prompt_tokens", "first_token_ids", "ended", "first_logprobs", "prompt_timings")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TIMINGS_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    first_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ended: bool
    first_logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.PositionLogprobs]
    prompt_timings: _node_pb2.StageTimings
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., first_token_ids: _Optional[_Iterable[int]] = ..., ended: _Optional[bool] = ..., first_logprobs: _Optional[_Iterable[_Union[_generation_pb2.PositionLogprobs, _Mapping]]] = ..., prompt_timings: _Optional[_Union[_node_pb2.StageTimings, _Mapping]] = ...) -> None: ...

class ReadProgress(_message.Message):
    __slots__ = ("attempt", "blocks_read")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_READ_FIELD_NUMBER: _ClassVar[int]
    attempt: _node_pb2.Attempt
    blocks_read: int
    def __init__(self, attempt: _Optional[_Union[_node_pb2.Attempt, _Mapping]] = ..., blocks_read: _Optional[int] = ...) -> None: ...

class ConfirmRead(_message.Message):
    __slots__ = ("attempt",)
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attempt: _node_pb2.Attempt
    def __init__(self, attempt: _Optional[_Union[_node_pb2.Attempt, _Mapping]] = ...) -> None: ...

class ReadConfirmed(_message.Message):
    __slots__ = ("attempt", "held", "digests")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    attempt: _node_pb2.Attempt
    held: bool
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, attempt: _Optional[_Union[_node_pb2.Attempt, _Mapping]] = ..., held: _Optional[bool] = ..., digests: _Optional[_Iterable[int]] = ...) -> None: ...

class ConfirmPart(_message.Message):
    __slots__ = ("attempt", "end_block")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    END_BLOCK_FIELD_NUMBER: _ClassVar[int]
    attempt: _node_pb2.Attempt
    end_block: int
    def __init__(self, attempt: _Optional[_Union[_node_pb2.Attempt, _Mapping]] = ..., end_block: _Optional[int] = ...) -> None: ...

class PartConfirmed(_message.Message):
    __slots__ = ("attempt", "first_block", "digests")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    attempt: _node_pb2.Attempt
    first_block: int
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, attempt: _Optional[_Union[_node_pb2.Attempt, _Mapping]] = ..., first_block: _Optional[int] = ..., digests: _Optional[_Iterable[int]] = ...) -> None: ...

class Abandon(_message.Message):
    __slots__ = ("attempt", "reads_in_flight")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    READS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    attempt: _node_pb2.Attempt
    reads_in_flight: bool
    def __init__(self, attempt: _Optional[_Union[_node_pb2.Attempt, _Mapping]] = ..., reads_in_flight: _Optional[bool] = ...) -> None: ...

class OfferLost(_message.Message):
    __slots__ = ("attempt", "story", "cause")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STORY_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    attempt: _node_pb2.Attempt
    story: str
    cause: _node_pb2.TransferCause
    def __init__(self, attempt: _Optional[_Union[_node_pb2.Attempt, _Mapping]] = ..., story: _Optional[str] = ..., cause: _Optional[_Union[_node_pb2.TransferCause, str]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("seq",)
    SEQ_FIELD_NUMBER: _ClassVar[int]
    seq: int
    def __init__(self, seq: _Optional[int] = ...) -> None: ...
