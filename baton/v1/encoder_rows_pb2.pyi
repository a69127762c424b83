from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ReadRowsRequest(_message.Message):
    __slots__ = ("incarnation", "digest", "model_fingerprint", "dtype", "numerics")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    digest: str
    model_fingerprint: str
    dtype: str
    numerics: str
    def __init__(self, incarnation: _Optional[str] = ..., digest: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., numerics: _Optional[str] = ...) -> None: ...

class ReadRowsResponse(_message.Message):
    __slots__ = ("rows", "checksum")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    checksum: bytes
    def __init__(self, rows: _Optional[bytes] = ..., checksum: _Optional[bytes] = ...) -> None: ...
