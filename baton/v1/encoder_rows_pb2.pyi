from baton.v1 import node_pb2 as _node_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReadRowsRequest(_message.Message):
    __slots__ = ("incarnation", "digest", "model_fingerprint", "dtype", "numerics", "content", "num_rows", "tenant")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    digest: str
    model_fingerprint: str
    dtype: str
    numerics: str
    content: _node_pb2.EncoderContent
    num_rows: int
    tenant: str
    def __init__(self, incarnation: _Optional[str] = ..., digest: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., numerics: _Optional[str] = ..., content: _Optional[_Union[_node_pb2.EncoderContent, _Mapping]] = ..., num_rows: _Optional[int] = ..., tenant: _Optional[str] = ...) -> None: ...

class ReadRowsResponse(_message.Message):
    __slots__ = ("rows", "checksum")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    checksum: bytes
    def __init__(self, rows: _Optional[bytes] = ..., checksum: _Optional[bytes] = ...) -> None: ...
