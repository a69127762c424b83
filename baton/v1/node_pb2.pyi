from baton.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_ENCODE: _ClassVar[Role]

class Leg(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEG_UNSPECIFIED: _ClassVar[Leg]
    LEG_WHOLE: _ClassVar[Leg]
    LEG_PREFILL: _ClassVar[Leg]
    LEG_DECODE: _ClassVar[Leg]
    LEG_EMBED: _ClassVar[Leg]

class ContentKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONTENT_KIND_UNSPECIFIED: _ClassVar[ContentKind]
    CONTENT_KIND_IMAGE: _ClassVar[ContentKind]
    CONTENT_KIND_SPEECH: _ClassVar[ContentKind]
    CONTENT_KIND_TEXT: _ClassVar[ContentKind]

class KVCacheTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_CACHE_TIER_UNSPECIFIED: _ClassVar[KVCacheTier]
    KV_CACHE_TIER_DEVICE: _ClassVar[KVCacheTier]
    KV_CACHE_TIER_HOST: _ClassVar[KVCacheTier]
    KV_CACHE_TIER_ENCODER: _ClassVar[KVCacheTier]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_STOP: _ClassVar[Outcome]
    OUTCOME_LENGTH: _ClassVar[Outcome]
    OUTCOME_HANDED_OFF: _ClassVar[Outcome]
    OUTCOME_ABORTED: _ClassVar[Outcome]
    OUTCOME_IGNORED: _ClassVar[Outcome]
    OUTCOME_ERROR: _ClassVar[Outcome]
    OUTCOME_KV_LOST: _ClassVar[Outcome]
    OUTCOME_REFUSED: _ClassVar[Outcome]
    OUTCOME_MOVED: _ClassVar[Outcome]
    OUTCOME_UNKNOWN: _ClassVar[Outcome]
    OUTCOME_INVALID: _ClassVar[Outcome]
    OUTCOME_REPETITION: _ClassVar[Outcome]
    OUTCOME_ADAPTER_UNAVAILABLE: _ClassVar[Outcome]

class TransferCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSFER_CAUSE_UNSPECIFIED: _ClassVar[TransferCause]
    TRANSFER_CAUSE_PEER_GONE: _ClassVar[TransferCause]
    TRANSFER_CAUSE_LEASE_LOST: _ClassVar[TransferCause]
    TRANSFER_CAUSE_DIGEST_MISMATCH: _ClassVar[TransferCause]
    TRANSFER_CAUSE_LAYOUT_MISMATCH: _ClassVar[TransferCause]
    TRANSFER_CAUSE_DEADLINE: _ClassVar[TransferCause]
    TRANSFER_CAUSE_REFUSED: _ClassVar[TransferCause]
    TRANSFER_CAUSE_CANCELLED: _ClassVar[TransferCause]
    TRANSFER_CAUSE_STALLED: _ClassVar[TransferCause]
    TRANSFER_CAUSE_PROBE_FAILED: _ClassVar[TransferCause]

class HandoffSide(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HANDOFF_SIDE_UNSPECIFIED: _ClassVar[HandoffSide]
    HANDOFF_SIDE_SENDER: _ClassVar[HandoffSide]
    HANDOFF_SIDE_READER: _ClassVar[HandoffSide]

class ProbeFault(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROBE_FAULT_UNSPECIFIED: _ClassVar[ProbeFault]
    PROBE_FAULT_TIMED_OUT: _ClassVar[ProbeFault]
    PROBE_FAULT_WRONG_BYTES: _ClassVar[ProbeFault]
    PROBE_FAULT_READ_FAILED: _ClassVar[ProbeFault]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_ENCODE: Role
LEG_UNSPECIFIED: Leg
LEG_WHOLE: Leg
LEG_PREFILL: Leg
LEG_DECODE: Leg
LEG_EMBED: Leg
CONTENT_KIND_UNSPECIFIED: ContentKind
CONTENT_KIND_IMAGE: ContentKind
CONTENT_KIND_SPEECH: ContentKind
CONTENT_KIND_TEXT: ContentKind
KV_CACHE_TIER_UNSPECIFIED: KVCacheTier
KV_CACHE_TIER_DEVICE: KVCacheTier
KV_CACHE_TIER_HOST: KVCacheTier
KV_CACHE_TIER_ENCODER: KVCacheTier
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_STOP: Outcome
OUTCOME_LENGTH: Outcome
OUTCOME_HANDED_OFF: Outcome
OUTCOME_ABORTED: Outcome
OUTCOME_IGNORED: Outcome
OUTCOME_ERROR: Outcome
OUTCOME_KV_LOST: Outcome
OUTCOME_REFUSED: Outcome
OUTCOME_MOVED: Outcome
OUTCOME_UNKNOWN: Outcome
OUTCOME_INVALID: Outcome
OUTCOME_REPETITION: Outcome
OUTCOME_ADAPTER_UNAVAILABLE: Outcome
TRANSFER_CAUSE_UNSPECIFIED: TransferCause
TRANSFER_CAUSE_PEER_GONE: TransferCause
TRANSFER_CAUSE_LEASE_LOST: TransferCause
TRANSFER_CAUSE_DIGEST_MISMATCH: TransferCause
TRANSFER_CAUSE_LAYOUT_MISMATCH: TransferCause
TRANSFER_CAUSE_DEADLINE: TransferCause
TRANSFER_CAUSE_REFUSED: TransferCause
TRANSFER_CAUSE_CANCELLED: TransferCause
TRANSFER_CAUSE_STALLED: TransferCause
TRANSFER_CAUSE_PROBE_FAILED: TransferCause
HANDOFF_SIDE_UNSPECIFIED: HandoffSide
HANDOFF_SIDE_SENDER: HandoffSide
HANDOFF_SIDE_READER: HandoffSide
PROBE_FAULT_UNSPECIFIED: ProbeFault
PROBE_FAULT_TIMED_OUT: ProbeFault
PROBE_FAULT_WRONG_BYTES: ProbeFault
PROBE_FAULT_READ_FAILED: ProbeFault

class Attempt(_message.Message):
    __slots__ = ("request_id", "attempt", "flight")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FLIGHT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    flight: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., flight: _Optional[int] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("node_id", "incarnation", "address")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: str
    address: str
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("hello", "submit", "abort", "watch_kv_cache", "adopt", "adapters", "move_out")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    WATCH_KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MOVE_OUT_FIELD_NUMBER: _ClassVar[int]
    hello: AttachHello
    submit: Submit
    abort: Abort
    watch_kv_cache: WatchKVCache
    adopt: Adopt
    adapters: AdapterList
    move_out: MoveOut
    def __init__(self, hello: _Optional[_Union[AttachHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., watch_kv_cache: _Optional[_Union[WatchKVCache, _Mapping]] = ..., adopt: _Optional[_Union[Adopt, _Mapping]] = ..., adapters: _Optional[_Union[AdapterList, _Mapping]] = ..., move_out: _Optional[_Union[MoveOut, _Mapping]] = ...) -> None: ...

class AttachHello(_message.Message):
    __slots__ = ("router_id", "incarnation", "router_incarnation", "takes_next_tokens", "keeps")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TAKES_NEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEEPS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    incarnation: str
    router_incarnation: str
    takes_next_tokens: bool
    keeps: _containers.RepeatedCompositeFieldContainer[Attempt]
    def __init__(self, router_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., router_incarnation: _Optional[str] = ..., takes_next_tokens: _Optional[bool] = ..., keeps: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ...) -> None: ...

class PromptSpan(_message.Message):
    __slots__ = ("start", "length", "digest", "dtype", "rows", "is_encoded", "first_row", "columns")
    START_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    IS_ENCODED_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    start: int
    length: int
    digest: str
    dtype: str
    rows: bytes
    is_encoded: bool
    first_row: int
    columns: int
    def __init__(self, start: _Optional[int] = ..., length: _Optional[int] = ..., digest: _Optional[str] = ..., dtype: _Optional[str] = ..., rows: _Optional[bytes] = ..., is_encoded: _Optional[bool] = ..., first_row: _Optional[int] = ..., columns: _Optional[int] = ...) -> None: ...

class EncoderContent(_message.Message):
    __slots__ = ("digest", "data", "kind", "held_by", "encoded_by")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    HELD_BY_FIELD_NUMBER: _ClassVar[int]
    ENCODED_BY_FIELD_NUMBER: _ClassVar[int]
    digest: str
    data: bytes
    kind: ContentKind
    held_by: Peer
    encoded_by: Peer
    def __init__(self, digest: _Optional[str] = ..., data: _Optional[bytes] = ..., kind: _Optional[_Union[ContentKind, str]] = ..., held_by: _Optional[_Union[Peer, _Mapping]] = ..., encoded_by: _Optional[_Union[Peer, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("attempt", "leg", "prompt_token_ids", "sampling_params", "priority", "cache_salt", "kv_source", "output_token_ids", "traceparent", "takeover", "reader_block_size", "adapter", "pooling", "spans", "contents", "turn", "held_prefix", "cut_by", "kv_bits")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    KV_SOURCE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TAKEOVER_FIELD_NUMBER: _ClassVar[int]
    READER_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    HELD_PREFIX_FIELD_NUMBER: _ClassVar[int]
    CUT_BY_FIELD_NUMBER: _ClassVar[int]
    KV_BITS_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    leg: Leg
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: _generation_pb2.SamplingParams
    priority: int
    cache_salt: str
    kv_source: Peer
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    traceparent: str
    takeover: int
    reader_block_size: int
    adapter: str
    pooling: PoolingParams
    spans: _containers.RepeatedCompositeFieldContainer[PromptSpan]
    contents: _containers.RepeatedCompositeFieldContainer[EncoderContent]
    turn: float
    held_prefix: HeldPrefix
    cut_by: int
    kv_bits: str
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., leg: _Optional[_Union[Leg, str]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., kv_source: _Optional[_Union[Peer, _Mapping]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., traceparent: _Optional[str] = ..., takeover: _Optional[int] = ..., reader_block_size: _Optional[int] = ..., adapter: _Optional[str] = ..., pooling: _Optional[_Union[PoolingParams, _Mapping]] = ..., spans: _Optional[_Iterable[_Union[PromptSpan, _Mapping]]] = ..., contents: _Optional[_Iterable[_Union[EncoderContent, _Mapping]]] = ..., turn: _Optional[float] = ..., held_prefix: _Optional[_Union[HeldPrefix, _Mapping]] = ..., cut_by: _Optional[int] = ..., kv_bits: _Optional[str] = ...) -> None: ...

class MoveOut(_message.Message):
    __slots__ = ("attempt", "to", "num_tokens", "cut_by")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CUT_BY_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    to: Attempt
    num_tokens: int
    cut_by: int
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., to: _Optional[_Union[Attempt, _Mapping]] = ..., num_tokens: _Optional[int] = ..., cut_by: _Optional[int] = ...) -> None: ...

class HeldPrefix(_message.Message):
    __slots__ = ("peer", "num_tokens")
    PEER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    peer: Peer
    num_tokens: int
    def __init__(self, peer: _Optional[_Union[Peer, _Mapping]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class AdapterList(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterSource]
    def __init__(self, adapters: _Optional[_Iterable[_Union[AdapterSource, _Mapping]]] = ...) -> None: ...

class AdapterSource(_message.Message):
    __slots__ = ("name", "directory", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    directory: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., directory: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class PoolingParams(_message.Message):
    __slots__ = ("kind", "normalize", "dimensions", "activate", "second_start", "num_rows")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATE_FIELD_NUMBER: _ClassVar[int]
    SECOND_START_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    kind: _generation_pb2.Pooling
    normalize: bool
    dimensions: int
    activate: bool
    second_start: int
    num_rows: int
    def __init__(self, kind: _Optional[_Union[_generation_pb2.Pooling, str]] = ..., normalize: _Optional[bool] = ..., dimensions: _Optional[int] = ..., activate: _Optional[bool] = ..., second_start: _Optional[int] = ..., num_rows: _Optional[int] = ...) -> None: ...

class Adopt(_message.Message):
    __slots__ = ("attempt", "takeover", "num_tokens")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TAKEOVER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    takeover: int
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., takeover: _Optional[int] = ..., num_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("attempt", "reason", "sequence_index", "takeover")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TAKEOVER_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    reason: str
    sequence_index: int
    takeover: int
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., reason: _Optional[str] = ..., sequence_index: _Optional[int] = ..., takeover: _Optional[int] = ...) -> None: ...

class WatchKVCache(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("welcome", "report")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    welcome: NodeDescription
    report: StepReport
    def __init__(self, welcome: _Optional[_Union[NodeDescription, _Mapping]] = ..., report: _Optional[_Union[StepReport, _Mapping]] = ...) -> None: ...

class NodeDescription(_message.Message):
    __slots__ = ("node_id", "incarnation", "role", "address", "pid", "version", "model", "model_fingerprint", "dtype", "numerics", "bit_exact", "vocab_size", "max_model_len", "block_size", "num_blocks", "eos_token_ids", "on_transfer_failure", "kv_layout", "block_bytes", "max_num_seqs", "max_num_batched_tokens", "link_protocol", "embedding_size", "num_threads", "tp", "pp", "capabilities", "row_width", "most_short_tokens", "bit_exact_reason", "is_verified", "why_unverified", "model_type", "kv_groups", "row_numerics", "takes_moves", "kv_shape")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    BIT_EXACT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ON_TRANSFER_FAILURE_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LINK_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    PP_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    ROW_WIDTH_FIELD_NUMBER: _ClassVar[int]
    MOST_SHORT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BIT_EXACT_REASON_FIELD_NUMBER: _ClassVar[int]
    IS_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    WHY_UNVERIFIED_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    KV_GROUPS_FIELD_NUMBER: _ClassVar[int]
    ROW_NUMERICS_FIELD_NUMBER: _ClassVar[int]
    TAKES_MOVES_FIELD_NUMBER: _ClassVar[int]
    KV_SHAPE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: str
    role: Role
    address: str
    pid: int
    version: str
    model: str
    model_fingerprint: str
    dtype: str
    numerics: str
    bit_exact: bool
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    on_transfer_failure: str
    kv_layout: str
    block_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    link_protocol: int
    embedding_size: int
    num_threads: int
    tp: int
    pp: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    row_width: int
    most_short_tokens: int
    bit_exact_reason: str
    is_verified: bool
    why_unverified: str
    model_type: str
    kv_groups: int
    row_numerics: str
    takes_moves: bool
    kv_shape: str
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., version: _Optional[str] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., numerics: _Optional[str] = ..., bit_exact: _Optional[bool] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., on_transfer_failure: _Optional[str] = ..., kv_layout: _Optional[str] = ..., block_bytes: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., link_protocol: _Optional[int] = ..., embedding_size: _Optional[int] = ..., num_threads: _Optional[int] = ..., tp: _Optional[int] = ..., pp: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ..., row_width: _Optional[int] = ..., most_short_tokens: _Optional[int] = ..., bit_exact_reason: _Optional[str] = ..., is_verified: _Optional[bool] = ..., why_unverified: _Optional[str] = ..., model_type: _Optional[str] = ..., kv_groups: _Optional[int] = ..., row_numerics: _Optional[str] = ..., takes_moves: _Optional[bool] = ..., kv_shape: _Optional[str] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("deltas", "load", "kv_cache", "notice", "step", "next_token_ids", "next_places", "adapters")
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PLACES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[RequestDelta]
    load: LoadReport
    kv_cache: KVCacheUpdate
    notice: str
    step: StepFigures
    next_token_ids: _containers.RepeatedScalarFieldContainer[int]
    next_places: _containers.RepeatedScalarFieldContainer[int]
    adapters: AdapterReport
    def __init__(self, deltas: _Optional[_Iterable[_Union[RequestDelta, _Mapping]]] = ..., load: _Optional[_Union[LoadReport, _Mapping]] = ..., kv_cache: _Optional[_Union[KVCacheUpdate, _Mapping]] = ..., notice: _Optional[str] = ..., step: _Optional[_Union[StepFigures, _Mapping]] = ..., next_token_ids: _Optional[_Iterable[int]] = ..., next_places: _Optional[_Iterable[int]] = ..., adapters: _Optional[_Union[AdapterReport, _Mapping]] = ...) -> None: ...

class AdapterReport(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterStatus]
    def __init__(self, adapters: _Optional[_Iterable[_Union[AdapterStatus, _Mapping]]] = ...) -> None: ...

class AdapterStatus(_message.Message):
    __slots__ = ("digest", "refusal")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    digest: str
    refusal: str
    def __init__(self, digest: _Optional[str] = ..., refusal: _Optional[str] = ...) -> None: ...

class StepFigures(_message.Message):
    __slots__ = ("step_ms", "prefill_tokens", "decode_sequences", "decode_context_tokens", "drafts", "draft_tokens", "accepted_tokens")
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    step_ms: float
    prefill_tokens: int
    decode_sequences: int
    decode_context_tokens: int
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    def __init__(self, step_ms: _Optional[float] = ..., prefill_tokens: _Optional[int] = ..., decode_sequences: _Optional[int] = ..., decode_context_tokens: _Optional[int] = ..., drafts: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class KVCacheUpdate(_message.Message):
    __slots__ = ("first_sequence", "next_sequence", "restart", "events")
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    first_sequence: int
    next_sequence: int
    restart: bool
    events: _containers.RepeatedCompositeFieldContainer[KVCacheEvent]
    def __init__(self, first_sequence: _Optional[int] = ..., next_sequence: _Optional[int] = ..., restart: _Optional[bool] = ..., events: _Optional[_Iterable[_Union[KVCacheEvent, _Mapping]]] = ...) -> None: ...

class KVCacheEvent(_message.Message):
    __slots__ = ("block_stored", "block_removed", "all_blocks_cleared")
    BLOCK_STORED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_REMOVED_FIELD_NUMBER: _ClassVar[int]
    ALL_BLOCKS_CLEARED_FIELD_NUMBER: _ClassVar[int]
    block_stored: BlockStored
    block_removed: BlockRemoved
    all_blocks_cleared: AllBlocksCleared
    def __init__(self, block_stored: _Optional[_Union[BlockStored, _Mapping]] = ..., block_removed: _Optional[_Union[BlockRemoved, _Mapping]] = ..., all_blocks_cleared: _Optional[_Union[AllBlocksCleared, _Mapping]] = ...) -> None: ...

class BlockStored(_message.Message):
    __slots__ = ("block_hashes", "parent_block_hash", "group", "tier")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENT_BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    parent_block_hash: bytes
    group: int
    tier: KVCacheTier
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ..., parent_block_hash: _Optional[bytes] = ..., group: _Optional[int] = ..., tier: _Optional[_Union[KVCacheTier, str]] = ...) -> None: ...

class BlockRemoved(_message.Message):
    __slots__ = ("block_hashes", "tier")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    tier: KVCacheTier
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ..., tier: _Optional[_Union[KVCacheTier, str]] = ...) -> None: ...

class AllBlocksCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RequestDelta(_message.Message):
    __slots__ = ("attempt", "first_index", "token_ids", "logprobs", "outcome", "stop_token_id", "error", "timings", "transfer_cause", "sequence_index", "embedding", "takeover", "prompt_logprobs", "draft_counts", "prompt_timings", "error_field")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_CAUSE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    TAKEOVER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TIMINGS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.PositionLogprobs]
    outcome: Outcome
    stop_token_id: int
    error: str
    timings: StageTimings
    transfer_cause: TransferCause
    sequence_index: int
    embedding: bytes
    takeover: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.PositionLogprobs]
    draft_counts: DraftCounts
    prompt_timings: StageTimings
    error_field: str
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.PositionLogprobs, _Mapping]]] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., stop_token_id: _Optional[int] = ..., error: _Optional[str] = ..., timings: _Optional[_Union[StageTimings, _Mapping]] = ..., transfer_cause: _Optional[_Union[TransferCause, str]] = ..., sequence_index: _Optional[int] = ..., embedding: _Optional[bytes] = ..., takeover: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_generation_pb2.PositionLogprobs, _Mapping]]] = ..., draft_counts: _Optional[_Union[DraftCounts, _Mapping]] = ..., prompt_timings: _Optional[_Union[StageTimings, _Mapping]] = ..., error_field: _Optional[str] = ...) -> None: ...

class DraftCounts(_message.Message):
    __slots__ = ("num_drafted", "num_accepted")
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    num_drafted: int
    num_accepted: int
    def __init__(self, num_drafted: _Optional[int] = ..., num_accepted: _Optional[int] = ...) -> None: ...

class StageTimings(_message.Message):
    __slots__ = ("queue_ms", "prefill_ms", "transfer_ms", "cached_tokens", "external_tokens", "kv_bytes", "intake_ms", "decode_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    INTAKE_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    cached_tokens: int
    external_tokens: int
    kv_bytes: int
    intake_ms: float
    decode_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., external_tokens: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., intake_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("running", "waiting", "waiting_for_remote_kvs", "total_blocks", "free_blocks", "leased_blocks", "quarantined_blocks", "draining", "uncomputed_tokens", "context_tokens", "promised_blocks")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_REMOTE_KVS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    UNCOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMISED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    waiting_for_remote_kvs: int
    total_blocks: int
    free_blocks: int
    leased_blocks: int
    quarantined_blocks: int
    draining: bool
    uncomputed_tokens: int
    context_tokens: int
    promised_blocks: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_for_remote_kvs: _Optional[int] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., draining: _Optional[bool] = ..., uncomputed_tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ..., promised_blocks: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("node", "load", "handoff", "waiting_by_reason", "compute_paths", "ranks", "adapters")
    class WaitingByReasonEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    WAITING_BY_REASON_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_PATHS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    node: NodeDescription
    load: LoadReport
    handoff: HandoffReport
    waiting_by_reason: _containers.ScalarMap[str, int]
    compute_paths: _containers.RepeatedCompositeFieldContainer[ComputePath]
    ranks: _containers.RepeatedCompositeFieldContainer[RankReport]
    adapters: _containers.RepeatedCompositeFieldContainer[NodeAdapter]
    def __init__(self, node: _Optional[_Union[NodeDescription, _Mapping]] = ..., load: _Optional[_Union[LoadReport, _Mapping]] = ..., handoff: _Optional[_Union[HandoffReport, _Mapping]] = ..., waiting_by_reason: _Optional[_Mapping[str, int]] = ..., compute_paths: _Optional[_Iterable[_Union[ComputePath, _Mapping]]] = ..., ranks: _Optional[_Iterable[_Union[RankReport, _Mapping]]] = ..., adapters: _Optional[_Iterable[_Union[NodeAdapter, _Mapping]]] = ...) -> None: ...

class NodeAdapter(_message.Message):
    __slots__ = ("name", "digest", "directory", "state", "refusal")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    directory: str
    state: str
    refusal: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., directory: _Optional[str] = ..., state: _Optional[str] = ..., refusal: _Optional[str] = ...) -> None: ...

class RankReport(_message.Message):
    __slots__ = ("rank", "pid", "is_up", "resident_bytes", "shared_bytes", "cpu_s", "num_threads", "host")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    IS_UP_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    is_up: bool
    resident_bytes: int
    shared_bytes: int
    cpu_s: float
    num_threads: int
    host: str
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ..., is_up: _Optional[bool] = ..., resident_bytes: _Optional[int] = ..., shared_bytes: _Optional[int] = ..., cpu_s: _Optional[float] = ..., num_threads: _Optional[int] = ..., host: _Optional[str] = ...) -> None: ...

class ComputePath(_message.Message):
    __slots__ = ("part", "runs", "why_not_faster")
    PART_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    WHY_NOT_FASTER_FIELD_NUMBER: _ClassVar[int]
    part: str
    runs: str
    why_not_faster: str
    def __init__(self, part: _Optional[str] = ..., runs: _Optional[str] = ..., why_not_faster: _Optional[str] = ...) -> None: ...

class HandoffReport(_message.Message):
    __slots__ = ("layout", "open", "ended", "refused_links", "failed_probes", "pairs")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_LINKS_FIELD_NUMBER: _ClassVar[int]
    FAILED_PROBES_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    layout: str
    open: _containers.RepeatedCompositeFieldContainer[OpenHandoff]
    ended: _containers.RepeatedCompositeFieldContainer[EndedHandoffs]
    refused_links: _containers.RepeatedCompositeFieldContainer[RefusedLink]
    failed_probes: _containers.RepeatedCompositeFieldContainer[FailedProbe]
    pairs: _containers.RepeatedCompositeFieldContainer[MeasuredPair]
    def __init__(self, layout: _Optional[str] = ..., open: _Optional[_Iterable[_Union[OpenHandoff, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[EndedHandoffs, _Mapping]]] = ..., refused_links: _Optional[_Iterable[_Union[RefusedLink, _Mapping]]] = ..., failed_probes: _Optional[_Iterable[_Union[FailedProbe, _Mapping]]] = ..., pairs: _Optional[_Iterable[_Union[MeasuredPair, _Mapping]]] = ...) -> None: ...

class OpenHandoff(_message.Message):
    __slots__ = ("attempt", "side", "state", "peer", "peer_incarnation", "num_blocks", "age_s")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SIDE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    PEER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    side: HandoffSide
    state: str
    peer: str
    peer_incarnation: str
    num_blocks: int
    age_s: float
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., side: _Optional[_Union[HandoffSide, str]] = ..., state: _Optional[str] = ..., peer: _Optional[str] = ..., peer_incarnation: _Optional[str] = ..., num_blocks: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class EndedHandoffs(_message.Message):
    __slots__ = ("peer", "outcome", "count")
    PEER_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    peer: str
    outcome: str
    count: int
    def __init__(self, peer: _Optional[str] = ..., outcome: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class RefusedLink(_message.Message):
    __slots__ = ("peer", "cause", "story", "age_s", "count")
    PEER_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    STORY_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    peer: str
    cause: str
    story: str
    age_s: float
    count: int
    def __init__(self, peer: _Optional[str] = ..., cause: _Optional[str] = ..., story: _Optional[str] = ..., age_s: _Optional[float] = ..., count: _Optional[int] = ...) -> None: ...

class FailedProbe(_message.Message):
    __slots__ = ("peer", "fault", "detail", "age_s", "count")
    PEER_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    peer: str
    fault: ProbeFault
    detail: str
    age_s: float
    count: int
    def __init__(self, peer: _Optional[str] = ..., fault: _Optional[_Union[ProbeFault, str]] = ..., detail: _Optional[str] = ..., age_s: _Optional[float] = ..., count: _Optional[int] = ...) -> None: ...

class MeasuredPair(_message.Message):
    __slots__ = ("peer", "bytes_per_second", "num_bytes", "lane", "from_memory", "to_memory", "why_slow")
    PEER_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    FROM_MEMORY_FIELD_NUMBER: _ClassVar[int]
    TO_MEMORY_FIELD_NUMBER: _ClassVar[int]
    WHY_SLOW_FIELD_NUMBER: _ClassVar[int]
    peer: str
    bytes_per_second: float
    num_bytes: int
    lane: str
    from_memory: str
    to_memory: str
    why_slow: str
    def __init__(self, peer: _Optional[str] = ..., bytes_per_second: _Optional[float] = ..., num_bytes: _Optional[int] = ..., lane: _Optional[str] = ..., from_memory: _Optional[str] = ..., to_memory: _Optional[str] = ..., why_slow: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("incarnation", "role")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    role: Role
    def __init__(self, incarnation: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    def __init__(self, incarnation: _Optional[str] = ...) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class InspectAdapterRequest(_message.Message):
    __slots__ = ("incarnation", "directory")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    directory: str
    def __init__(self, incarnation: _Optional[str] = ..., directory: _Optional[str] = ...) -> None: ...

class InspectAdapterResponse(_message.Message):
    __slots__ = ("digest", "rank", "num_bytes", "num_modules", "base_model")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_MODULES_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    digest: str
    rank: int
    num_bytes: int
    num_modules: int
    base_model: str
    def __init__(self, digest: _Optional[str] = ..., rank: _Optional[int] = ..., num_bytes: _Optional[int] = ..., num_modules: _Optional[int] = ..., base_model: _Optional[str] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("after", "steps_after")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    STEPS_AFTER_FIELD_NUMBER: _ClassVar[int]
    after: int
    steps_after: int
    def __init__(self, after: _Optional[int] = ..., steps_after: _Optional[int] = ...) -> None: ...

class TraceResponse(_message.Message):
    __slots__ = ("events", "monotonic_ns", "steps")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    MONOTONIC_NS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[TraceEvent]
    monotonic_ns: int
    steps: _containers.RepeatedCompositeFieldContainer[TraceStep]
    def __init__(self, events: _Optional[_Iterable[_Union[TraceEvent, _Mapping]]] = ..., monotonic_ns: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[TraceStep, _Mapping]]] = ...) -> None: ...

class TraceStep(_message.Message):
    __slots__ = ("seq", "monotonic_ns", "figures", "goes_on")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    MONOTONIC_NS_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    GOES_ON_FIELD_NUMBER: _ClassVar[int]
    seq: int
    monotonic_ns: int
    figures: StepFigures
    goes_on: bool
    def __init__(self, seq: _Optional[int] = ..., monotonic_ns: _Optional[int] = ..., figures: _Optional[_Union[StepFigures, _Mapping]] = ..., goes_on: _Optional[bool] = ...) -> None: ...

class TraceEvent(_message.Message):
    __slots__ = ("seq", "monotonic_ns", "name", "attempt", "value", "detail")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    MONOTONIC_NS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    seq: int
    monotonic_ns: int
    name: str
    attempt: Attempt
    value: int
    detail: str
    def __init__(self, seq: _Optional[int] = ..., monotonic_ns: _Optional[int] = ..., name: _Optional[str] = ..., attempt: _Optional[_Union[Attempt, _Mapping]] = ..., value: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...
