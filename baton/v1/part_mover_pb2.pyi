from baton.v1 import kv_link_pb2 as _kv_link_pb2
from baton.v1 import node_pb2 as _node_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToPart(_message.Message):
    __slots__ = ("start", "connect", "disconnect", "read", "cancel", "fill", "set_num_readers", "digest", "ask_turns", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    CONNECT_FIELD_NUMBER: _ClassVar[int]
    DISCONNECT_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    FILL_FIELD_NUMBER: _ClassVar[int]
    SET_NUM_READERS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ASK_TURNS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: StartMover
    connect: ConnectPeer
    disconnect: DisconnectPeer
    read: ReadBlocks
    cancel: CancelRead
    fill: FillBlock
    set_num_readers: SetNumReaders
    digest: DigestBlocks
    ask_turns: AskTurns
    stop: StopMover
    def __init__(self, start: _Optional[_Union[StartMover, _Mapping]] = ..., connect: _Optional[_Union[ConnectPeer, _Mapping]] = ..., disconnect: _Optional[_Union[DisconnectPeer, _Mapping]] = ..., read: _Optional[_Union[ReadBlocks, _Mapping]] = ..., cancel: _Optional[_Union[CancelRead, _Mapping]] = ..., fill: _Optional[_Union[FillBlock, _Mapping]] = ..., set_num_readers: _Optional[_Union[SetNumReaders, _Mapping]] = ..., digest: _Optional[_Union[DigestBlocks, _Mapping]] = ..., ask_turns: _Optional[_Union[AskTurns, _Mapping]] = ..., stop: _Optional[_Union[StopMover, _Mapping]] = ...) -> None: ...

class FromPart(_message.Message):
    __slots__ = ("up", "not_up", "connected", "not_connected", "read", "not_read", "stalled", "digests_of_read", "no_digests_of_read", "filled", "not_filled", "digests", "no_digests", "turns", "fault", "stopped")
    UP_FIELD_NUMBER: _ClassVar[int]
    NOT_UP_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    NOT_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    NOT_READ_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_OF_READ_FIELD_NUMBER: _ClassVar[int]
    NO_DIGESTS_OF_READ_FIELD_NUMBER: _ClassVar[int]
    FILLED_FIELD_NUMBER: _ClassVar[int]
    NOT_FILLED_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    NO_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    up: MoverUp
    not_up: MoverNotUp
    connected: PeerConnected
    not_connected: PeerNotConnected
    read: BlocksRead
    not_read: BlocksNotRead
    stalled: BlocksStalled
    digests_of_read: DigestsOfRead
    no_digests_of_read: NoDigestsOfRead
    filled: BlockIsFilled
    not_filled: BlockNotFilled
    digests: DigestsFound
    no_digests: DigestsNotFound
    turns: Turns
    fault: MoverFault
    stopped: MoverStopped
    def __init__(self, up: _Optional[_Union[MoverUp, _Mapping]] = ..., not_up: _Optional[_Union[MoverNotUp, _Mapping]] = ..., connected: _Optional[_Union[PeerConnected, _Mapping]] = ..., not_connected: _Optional[_Union[PeerNotConnected, _Mapping]] = ..., read: _Optional[_Union[BlocksRead, _Mapping]] = ..., not_read: _Optional[_Union[BlocksNotRead, _Mapping]] = ..., stalled: _Optional[_Union[BlocksStalled, _Mapping]] = ..., digests_of_read: _Optional[_Union[DigestsOfRead, _Mapping]] = ..., no_digests_of_read: _Optional[_Union[NoDigestsOfRead, _Mapping]] = ..., filled: _Optional[_Union[BlockIsFilled, _Mapping]] = ..., not_filled: _Optional[_Union[BlockNotFilled, _Mapping]] = ..., digests: _Optional[_Union[DigestsFound, _Mapping]] = ..., no_digests: _Optional[_Union[DigestsNotFound, _Mapping]] = ..., turns: _Optional[_Union[Turns, _Mapping]] = ..., fault: _Optional[_Union[MoverFault, _Mapping]] = ..., stopped: _Optional[_Union[MoverStopped, _Mapping]] = ...) -> None: ...

class StartMover(_message.Message):
    __slots__ = ("agent", "stall_s")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    agent: str
    stall_s: float
    def __init__(self, agent: _Optional[str] = ..., stall_s: _Optional[float] = ...) -> None: ...

class MoverUp(_message.Message):
    __slots__ = ("agent_metadata", "base_address", "num_blocks", "num_probe_blocks", "kind", "device_id", "layers")
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROBE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    agent_metadata: bytes
    base_address: int
    num_blocks: int
    num_probe_blocks: int
    kind: str
    device_id: int
    layers: _kv_link_pb2.LayerRange
    def __init__(self, agent_metadata: _Optional[bytes] = ..., base_address: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_probe_blocks: _Optional[int] = ..., kind: _Optional[str] = ..., device_id: _Optional[int] = ..., layers: _Optional[_Union[_kv_link_pb2.LayerRange, _Mapping]] = ...) -> None: ...

class MoverNotUp(_message.Message):
    __slots__ = ("detail",)
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    detail: str
    def __init__(self, detail: _Optional[str] = ...) -> None: ...

class ConnectPeer(_message.Message):
    __slots__ = ("incarnation", "agent_metadata", "base_address", "num_blocks", "block_bytes", "kind", "device_id", "num_probe_blocks", "block_size", "layers")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PROBE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    agent_metadata: bytes
    base_address: int
    num_blocks: int
    block_bytes: int
    kind: str
    device_id: int
    num_probe_blocks: int
    block_size: int
    layers: _kv_link_pb2.LayerRange
    def __init__(self, incarnation: _Optional[str] = ..., agent_metadata: _Optional[bytes] = ..., base_address: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., kind: _Optional[str] = ..., device_id: _Optional[int] = ..., num_probe_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., layers: _Optional[_Union[_kv_link_pb2.LayerRange, _Mapping]] = ...) -> None: ...

class PeerConnected(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    def __init__(self, incarnation: _Optional[str] = ...) -> None: ...

class PeerNotConnected(_message.Message):
    __slots__ = ("incarnation", "cause", "detail")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    cause: _node_pb2.TransferCause
    detail: str
    def __init__(self, incarnation: _Optional[str] = ..., cause: _Optional[_Union[_node_pb2.TransferCause, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class DisconnectPeer(_message.Message):
    __slots__ = ("agent",)
    AGENT_FIELD_NUMBER: _ClassVar[int]
    agent: str
    def __init__(self, agent: _Optional[str] = ...) -> None: ...

class ReadBlocks(_message.Message):
    __slots__ = ("read_id", "agent", "local_blocks", "remote_blocks", "counts", "groups", "to_digest", "digest_parts")
    READ_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    LOCAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TO_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DIGEST_PARTS_FIELD_NUMBER: _ClassVar[int]
    read_id: int
    agent: str
    local_blocks: _containers.RepeatedScalarFieldContainer[int]
    remote_blocks: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    groups: _containers.RepeatedScalarFieldContainer[int]
    to_digest: _containers.RepeatedScalarFieldContainer[int]
    digest_parts: int
    def __init__(self, read_id: _Optional[int] = ..., agent: _Optional[str] = ..., local_blocks: _Optional[_Iterable[int]] = ..., remote_blocks: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., groups: _Optional[_Iterable[int]] = ..., to_digest: _Optional[_Iterable[int]] = ..., digest_parts: _Optional[int] = ...) -> None: ...

class CancelRead(_message.Message):
    __slots__ = ("read_id",)
    READ_ID_FIELD_NUMBER: _ClassVar[int]
    read_id: int
    def __init__(self, read_id: _Optional[int] = ...) -> None: ...

class BlocksRead(_message.Message):
    __slots__ = ("read_id", "num_bytes", "post_s", "total_s", "num_descriptors")
    READ_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    POST_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    NUM_DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    read_id: int
    num_bytes: int
    post_s: float
    total_s: float
    num_descriptors: int
    def __init__(self, read_id: _Optional[int] = ..., num_bytes: _Optional[int] = ..., post_s: _Optional[float] = ..., total_s: _Optional[float] = ..., num_descriptors: _Optional[int] = ...) -> None: ...

class BlocksNotRead(_message.Message):
    __slots__ = ("read_id", "cause", "detail")
    READ_ID_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    read_id: int
    cause: _node_pb2.TransferCause
    detail: str
    def __init__(self, read_id: _Optional[int] = ..., cause: _Optional[_Union[_node_pb2.TransferCause, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class BlocksStalled(_message.Message):
    __slots__ = ("read_id", "detail")
    READ_ID_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    read_id: int
    detail: str
    def __init__(self, read_id: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class DigestsOfRead(_message.Message):
    __slots__ = ("read_id", "digests")
    class DigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    READ_ID_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    read_id: int
    digests: _containers.ScalarMap[int, int]
    def __init__(self, read_id: _Optional[int] = ..., digests: _Optional[_Mapping[int, int]] = ...) -> None: ...

class NoDigestsOfRead(_message.Message):
    __slots__ = ("read_id", "detail")
    READ_ID_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    read_id: int
    detail: str
    def __init__(self, read_id: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class FillBlock(_message.Message):
    __slots__ = ("fill_id", "block", "seed", "group")
    FILL_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    fill_id: int
    block: int
    seed: str
    group: int
    def __init__(self, fill_id: _Optional[int] = ..., block: _Optional[int] = ..., seed: _Optional[str] = ..., group: _Optional[int] = ...) -> None: ...

class BlockIsFilled(_message.Message):
    __slots__ = ("fill_id", "digests")
    class DigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    FILL_ID_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    fill_id: int
    digests: _containers.ScalarMap[int, int]
    def __init__(self, fill_id: _Optional[int] = ..., digests: _Optional[_Mapping[int, int]] = ...) -> None: ...

class BlockNotFilled(_message.Message):
    __slots__ = ("fill_id", "detail")
    FILL_ID_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    fill_id: int
    detail: str
    def __init__(self, fill_id: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class SetNumReaders(_message.Message):
    __slots__ = ("num_readers",)
    NUM_READERS_FIELD_NUMBER: _ClassVar[int]
    num_readers: int
    def __init__(self, num_readers: _Optional[int] = ...) -> None: ...

class DigestBlocks(_message.Message):
    __slots__ = ("question", "ids", "parts", "group")
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    question: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    parts: int
    group: int
    def __init__(self, question: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., parts: _Optional[int] = ..., group: _Optional[int] = ...) -> None: ...

class DigestsFound(_message.Message):
    __slots__ = ("question", "digests")
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    question: int
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, question: _Optional[int] = ..., digests: _Optional[_Iterable[int]] = ...) -> None: ...

class DigestsNotFound(_message.Message):
    __slots__ = ("question", "detail")
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    question: int
    detail: str
    def __init__(self, question: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class AskTurns(_message.Message):
    __slots__ = ("question",)
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    question: int
    def __init__(self, question: _Optional[int] = ...) -> None: ...

class Turns(_message.Message):
    __slots__ = ("question", "num_turns", "in_turn", "stuck_reads")
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    NUM_TURNS_FIELD_NUMBER: _ClassVar[int]
    IN_TURN_FIELD_NUMBER: _ClassVar[int]
    STUCK_READS_FIELD_NUMBER: _ClassVar[int]
    question: int
    num_turns: int
    in_turn: bool
    stuck_reads: int
    def __init__(self, question: _Optional[int] = ..., num_turns: _Optional[int] = ..., in_turn: _Optional[bool] = ..., stuck_reads: _Optional[int] = ...) -> None: ...

class MoverFault(_message.Message):
    __slots__ = ("detail",)
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    detail: str
    def __init__(self, detail: _Optional[str] = ...) -> None: ...

class StopMover(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MoverStopped(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
