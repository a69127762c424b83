from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("cluster", "health", "detail", "nodes")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    health: str
    detail: str
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    def __init__(self, cluster: _Optional[str] = ..., health: _Optional[str] = ..., detail: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("name", "role", "status", "incarnation", "address", "pid", "model", "running", "waiting", "kv_usage", "version", "age_s", "total_blocks", "free_blocks", "leased_blocks", "quarantined_blocks", "detail", "bit_exact")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    BIT_EXACT_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    status: str
    incarnation: str
    address: str
    pid: int
    model: str
    running: int
    waiting: int
    kv_usage: float
    version: str
    age_s: float
    total_blocks: int
    free_blocks: int
    leased_blocks: int
    quarantined_blocks: int
    detail: str
    bit_exact: bool
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., status: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., model: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_usage: _Optional[float] = ..., version: _Optional[str] = ..., age_s: _Optional[float] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., detail: _Optional[str] = ..., bit_exact: _Optional[bool] = ...) -> None: ...
