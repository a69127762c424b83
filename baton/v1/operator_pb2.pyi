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
    __slots__ = ("name", "role", "status", "incarnation", "address", "pid", "model", "running", "waiting", "kv_usage", "version", "age_s", "total_blocks", "free_blocks", "leased_blocks", "quarantined_blocks", "detail", "bit_exact", "cordoned", "desired_role", "in_flight", "tp", "pp", "capabilities", "bits", "is_verified")
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
    CORDONED_FIELD_NUMBER: _ClassVar[int]
    DESIRED_ROLE_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    PP_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    IS_VERIFIED_FIELD_NUMBER: _ClassVar[int]
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
    cordoned: bool
    desired_role: str
    in_flight: int
    tp: int
    pp: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    bits: str
    is_verified: bool
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., status: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., model: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_usage: _Optional[float] = ..., version: _Optional[str] = ..., age_s: _Optional[float] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., detail: _Optional[str] = ..., bit_exact: _Optional[bool] = ..., cordoned: _Optional[bool] = ..., desired_role: _Optional[str] = ..., in_flight: _Optional[int] = ..., tp: _Optional[int] = ..., pp: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ..., bits: _Optional[str] = ..., is_verified: _Optional[bool] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("limit", "request_id")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    limit: int
    request_id: str
    def __init__(self, limit: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestRow]
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestRow, _Mapping]]] = ...) -> None: ...

class RequestRow(_message.Message):
    __slots__ = ("request_id", "state", "router", "age_s", "prefill_node", "decode_node", "prompt_tokens", "output_tokens", "attempts", "ttft_ms", "total_ms", "kv_bytes", "detail")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    state: str
    router: str
    age_s: float
    prefill_node: str
    decode_node: str
    prompt_tokens: int
    output_tokens: int
    attempts: int
    ttft_ms: float
    total_ms: float
    kv_bytes: int
    detail: str
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[str] = ..., router: _Optional[str] = ..., age_s: _Optional[float] = ..., prefill_node: _Optional[str] = ..., decode_node: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., attempts: _Optional[int] = ..., ttft_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., kv_bytes: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class GetPlanRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPlanResponse(_message.Message):
    __slots__ = ("mode", "leads", "reason", "prefill_nodes", "decode_nodes", "wanted_prefill_nodes", "wanted_decode_nodes", "prefill_pressure", "decode_pressure", "wanted_prefill_pressure", "wanted_decode_pressure", "requests_per_s", "prompt_tokens", "output_tokens", "attained", "moves", "pools", "growths", "encode_nodes", "wanted_encode_nodes", "encode_pressure", "wanted_encode_pressure")
    MODE_FIELD_NUMBER: _ClassVar[int]
    LEADS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODES_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODES_FIELD_NUMBER: _ClassVar[int]
    WANTED_PREFILL_NODES_FIELD_NUMBER: _ClassVar[int]
    WANTED_DECODE_NODES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    DECODE_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    WANTED_PREFILL_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    WANTED_DECODE_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTAINED_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    GROWTHS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_NODES_FIELD_NUMBER: _ClassVar[int]
    WANTED_ENCODE_NODES_FIELD_NUMBER: _ClassVar[int]
    ENCODE_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    WANTED_ENCODE_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    mode: str
    leads: bool
    reason: str
    prefill_nodes: int
    decode_nodes: int
    wanted_prefill_nodes: int
    wanted_decode_nodes: int
    prefill_pressure: float
    decode_pressure: float
    wanted_prefill_pressure: float
    wanted_decode_pressure: float
    requests_per_s: float
    prompt_tokens: float
    output_tokens: float
    attained: float
    moves: _containers.RepeatedCompositeFieldContainer[PlannedMove]
    pools: _containers.RepeatedCompositeFieldContainer[PlannedPool]
    growths: _containers.RepeatedCompositeFieldContainer[PlannedGrowth]
    encode_nodes: int
    wanted_encode_nodes: int
    encode_pressure: float
    wanted_encode_pressure: float
    def __init__(self, mode: _Optional[str] = ..., leads: _Optional[bool] = ..., reason: _Optional[str] = ..., prefill_nodes: _Optional[int] = ..., decode_nodes: _Optional[int] = ..., wanted_prefill_nodes: _Optional[int] = ..., wanted_decode_nodes: _Optional[int] = ..., prefill_pressure: _Optional[float] = ..., decode_pressure: _Optional[float] = ..., wanted_prefill_pressure: _Optional[float] = ..., wanted_decode_pressure: _Optional[float] = ..., requests_per_s: _Optional[float] = ..., prompt_tokens: _Optional[float] = ..., output_tokens: _Optional[float] = ..., attained: _Optional[float] = ..., moves: _Optional[_Iterable[_Union[PlannedMove, _Mapping]]] = ..., pools: _Optional[_Iterable[_Union[PlannedPool, _Mapping]]] = ..., growths: _Optional[_Iterable[_Union[PlannedGrowth, _Mapping]]] = ..., encode_nodes: _Optional[int] = ..., wanted_encode_nodes: _Optional[int] = ..., encode_pressure: _Optional[float] = ..., wanted_encode_pressure: _Optional[float] = ...) -> None: ...

class PlannedMove(_message.Message):
    __slots__ = ("node", "origin", "to", "state", "reason", "age_s", "took_s")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    node: str
    origin: str
    to: str
    state: str
    reason: str
    age_s: float
    took_s: float
    def __init__(self, node: _Optional[str] = ..., origin: _Optional[str] = ..., to: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., age_s: _Optional[float] = ..., took_s: _Optional[float] = ...) -> None: ...

class PlannedPool(_message.Message):
    __slots__ = ("pool", "want", "have", "next_out")
    POOL_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    NEXT_OUT_FIELD_NUMBER: _ClassVar[int]
    pool: str
    want: int
    have: int
    next_out: str
    def __init__(self, pool: _Optional[str] = ..., want: _Optional[int] = ..., have: _Optional[int] = ..., next_out: _Optional[str] = ...) -> None: ...

class PlannedGrowth(_message.Message):
    __slots__ = ("pool", "before", "after", "state", "reason", "age_s", "took_s")
    POOL_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    pool: str
    before: int
    after: int
    state: str
    reason: str
    age_s: float
    took_s: float
    def __init__(self, pool: _Optional[str] = ..., before: _Optional[int] = ..., after: _Optional[int] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., age_s: _Optional[float] = ..., took_s: _Optional[float] = ...) -> None: ...

class ListTenantsRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ListTenantsResponse(_message.Message):
    __slots__ = ("tenants", "served_last_minute")
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    SERVED_LAST_MINUTE_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantRow]
    served_last_minute: float
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantRow, _Mapping]]] = ..., served_last_minute: _Optional[float] = ...) -> None: ...

class TenantRow(_message.Message):
    __slots__ = ("tenant", "service_class", "weight", "running", "waiting", "served_tokens", "served_last_minute", "placed_last_minute", "waited_s_last_minute", "lag_tokens", "displaced", "refused")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SERVICE_CLASS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SERVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SERVED_LAST_MINUTE_FIELD_NUMBER: _ClassVar[int]
    PLACED_LAST_MINUTE_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_LAST_MINUTE_FIELD_NUMBER: _ClassVar[int]
    LAG_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISPLACED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    service_class: str
    weight: float
    running: int
    waiting: int
    served_tokens: float
    served_last_minute: float
    placed_last_minute: int
    waited_s_last_minute: float
    lag_tokens: float
    displaced: int
    refused: int
    def __init__(self, tenant: _Optional[str] = ..., service_class: _Optional[str] = ..., weight: _Optional[float] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., served_tokens: _Optional[float] = ..., served_last_minute: _Optional[float] = ..., placed_last_minute: _Optional[int] = ..., waited_s_last_minute: _Optional[float] = ..., lag_tokens: _Optional[float] = ..., displaced: _Optional[int] = ..., refused: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("decisions", "waiting")
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[PlacementDecision]
    waiting: QueuePlace
    def __init__(self, decisions: _Optional[_Iterable[_Union[PlacementDecision, _Mapping]]] = ..., waiting: _Optional[_Union[QueuePlace, _Mapping]] = ...) -> None: ...

class QueuePlace(_message.Message):
    __slots__ = ("why", "waited_s", "tenants_before", "own_before", "tenant_counter", "virtual_time")
    WHY_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    TENANTS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    OWN_BEFORE_FIELD_NUMBER: _ClassVar[int]
    TENANT_COUNTER_FIELD_NUMBER: _ClassVar[int]
    VIRTUAL_TIME_FIELD_NUMBER: _ClassVar[int]
    why: str
    waited_s: float
    tenants_before: int
    own_before: int
    tenant_counter: float
    virtual_time: float
    def __init__(self, why: _Optional[str] = ..., waited_s: _Optional[float] = ..., tenants_before: _Optional[int] = ..., own_before: _Optional[int] = ..., tenant_counter: _Optional[float] = ..., virtual_time: _Optional[float] = ...) -> None: ...

class PlacementDecision(_message.Message):
    __slots__ = ("attempt", "age_s", "policy", "decision", "reason", "prompt_tokens", "prefill_node", "decode_node", "ways", "outcome", "bits", "continues_only_at", "tenant_counter", "virtual_time")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    WAYS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_ONLY_AT_FIELD_NUMBER: _ClassVar[int]
    TENANT_COUNTER_FIELD_NUMBER: _ClassVar[int]
    VIRTUAL_TIME_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    age_s: float
    policy: str
    decision: str
    reason: str
    prompt_tokens: int
    prefill_node: str
    decode_node: str
    ways: _containers.RepeatedCompositeFieldContainer[PlacementWay]
    outcome: PlacementOutcome
    bits: str
    continues_only_at: str
    tenant_counter: float
    virtual_time: float
    def __init__(self, attempt: _Optional[int] = ..., age_s: _Optional[float] = ..., policy: _Optional[str] = ..., decision: _Optional[str] = ..., reason: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., prefill_node: _Optional[str] = ..., decode_node: _Optional[str] = ..., ways: _Optional[_Iterable[_Union[PlacementWay, _Mapping]]] = ..., outcome: _Optional[_Union[PlacementOutcome, _Mapping]] = ..., bits: _Optional[str] = ..., continues_only_at: _Optional[str] = ..., tenant_counter: _Optional[float] = ..., virtual_time: _Optional[float] = ...) -> None: ...

class PlacementWay(_message.Message):
    __slots__ = ("prefill_node", "decode_node", "queue_ms", "cached_tokens", "prefill_ms", "decode_cached_tokens", "handoff_ms", "decode_ms", "stall_ms", "token_ms", "total_ms", "tokens_per_step", "pulled_tokens")
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    STALL_MS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    PULLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prefill_node: str
    decode_node: str
    queue_ms: float
    cached_tokens: int
    prefill_ms: float
    decode_cached_tokens: int
    handoff_ms: float
    decode_ms: float
    stall_ms: float
    token_ms: float
    total_ms: float
    tokens_per_step: float
    pulled_tokens: int
    def __init__(self, prefill_node: _Optional[str] = ..., decode_node: _Optional[str] = ..., queue_ms: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., prefill_ms: _Optional[float] = ..., decode_cached_tokens: _Optional[int] = ..., handoff_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ..., stall_ms: _Optional[float] = ..., token_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., tokens_per_step: _Optional[float] = ..., pulled_tokens: _Optional[int] = ...) -> None: ...

class PlacementOutcome(_message.Message):
    __slots__ = ("queue_ms", "prefill_ms", "transfer_ms", "cached_tokens", "kv_bytes", "first_token_ms", "best", "regret_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    REGRET_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    cached_tokens: int
    kv_bytes: int
    first_token_ms: float
    best: PlacementWay
    regret_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., first_token_ms: _Optional[float] = ..., best: _Optional[_Union[PlacementWay, _Mapping]] = ..., regret_ms: _Optional[float] = ...) -> None: ...

class GetTimelineRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class GetTimelineResponse(_message.Message):
    __slots__ = ("timeline",)
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    timeline: Timeline
    def __init__(self, timeline: _Optional[_Union[Timeline, _Mapping]] = ...) -> None: ...

class Timeline(_message.Message):
    __slots__ = ("request_id", "state", "detail", "age_s", "attempts", "prefill_node", "decode_node", "prompt_tokens", "completion_tokens", "cached_tokens", "kv_bytes", "kv_read_ns", "ttft_ns", "total_ns", "stages", "trace_id", "draft_tokens", "accepted_draft_tokens", "bit_exact")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_READ_NS_FIELD_NUMBER: _ClassVar[int]
    TTFT_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BIT_EXACT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    state: str
    detail: str
    age_s: float
    attempts: int
    prefill_node: str
    decode_node: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    kv_bytes: int
    kv_read_ns: int
    ttft_ns: int
    total_ns: int
    stages: _containers.RepeatedCompositeFieldContainer[TimelineStage]
    trace_id: str
    draft_tokens: int
    accepted_draft_tokens: int
    bit_exact: bool
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[str] = ..., detail: _Optional[str] = ..., age_s: _Optional[float] = ..., attempts: _Optional[int] = ..., prefill_node: _Optional[str] = ..., decode_node: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., kv_read_ns: _Optional[int] = ..., ttft_ns: _Optional[int] = ..., total_ns: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[TimelineStage, _Mapping]]] = ..., trace_id: _Optional[str] = ..., draft_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ..., bit_exact: _Optional[bool] = ...) -> None: ...

class TimelineStage(_message.Message):
    __slots__ = ("name", "where", "duration_ns", "after_first_token")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    where: str
    duration_ns: int
    after_first_token: bool
    def __init__(self, name: _Optional[str] = ..., where: _Optional[str] = ..., duration_ns: _Optional[int] = ..., after_first_token: _Optional[bool] = ...) -> None: ...

class CordonNodesRequest(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class CordonNodesResponse(_message.Message):
    __slots__ = ("warning",)
    WARNING_FIELD_NUMBER: _ClassVar[int]
    warning: str
    def __init__(self, warning: _Optional[str] = ...) -> None: ...

class UncordonNodesRequest(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class UncordonNodesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainNodeRequest(_message.Message):
    __slots__ = ("node", "stop")
    NODE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    node: str
    stop: bool
    def __init__(self, node: _Optional[str] = ..., stop: _Optional[bool] = ...) -> None: ...

class DrainNodeResponse(_message.Message):
    __slots__ = ("running", "waiting", "leased_blocks", "quarantined_blocks", "in_flight", "idle", "stopped")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    leased_blocks: int
    quarantined_blocks: int
    in_flight: int
    idle: bool
    stopped: bool
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., in_flight: _Optional[int] = ..., idle: _Optional[bool] = ..., stopped: _Optional[bool] = ...) -> None: ...

class SetNodeRoleRequest(_message.Message):
    __slots__ = ("node", "role")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    node: str
    role: str
    def __init__(self, node: _Optional[str] = ..., role: _Optional[str] = ...) -> None: ...

class SetNodeRoleResponse(_message.Message):
    __slots__ = ("unchanged", "warning")
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    unchanged: bool
    warning: str
    def __init__(self, unchanged: _Optional[bool] = ..., warning: _Optional[str] = ...) -> None: ...

class ResetNodeCacheRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class ResetNodeCacheResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class MoveStreamRequest(_message.Message):
    __slots__ = ("request_id", "node")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    node: str
    def __init__(self, request_id: _Optional[str] = ..., node: _Optional[str] = ...) -> None: ...

class MoveStreamResponse(_message.Message):
    __slots__ = ("source", "to")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    source: str
    to: str
    def __init__(self, source: _Optional[str] = ..., to: _Optional[str] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "directory", "replaces")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    name: str
    directory: str
    replaces: bool
    def __init__(self, name: _Optional[str] = ..., directory: _Optional[str] = ..., replaces: _Optional[bool] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("digest", "rank", "num_bytes", "unchanged", "warnings")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    rank: int
    num_bytes: int
    unchanged: bool
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, digest: _Optional[str] = ..., rank: _Optional[int] = ..., num_bytes: _Optional[int] = ..., unchanged: _Optional[bool] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterRow]
    def __init__(self, adapters: _Optional[_Iterable[_Union[AdapterRow, _Mapping]]] = ...) -> None: ...

class AdapterRow(_message.Message):
    __slots__ = ("name", "digest", "directory", "nodes", "refusals")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    directory: str
    nodes: _containers.RepeatedScalarFieldContainer[str]
    refusals: _containers.RepeatedCompositeFieldContainer[AdapterRefusal]
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., directory: _Optional[str] = ..., nodes: _Optional[_Iterable[str]] = ..., refusals: _Optional[_Iterable[_Union[AdapterRefusal, _Mapping]]] = ...) -> None: ...

class AdapterRefusal(_message.Message):
    __slots__ = ("node", "reason")
    NODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    node: str
    reason: str
    def __init__(self, node: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("after", "follow")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    after: int
    follow: bool
    def __init__(self, after: _Optional[int] = ..., follow: _Optional[bool] = ...) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: ClusterEvent
    def __init__(self, event: _Optional[_Union[ClusterEvent, _Mapping]] = ...) -> None: ...

class ClusterEvent(_message.Message):
    __slots__ = ("seq", "time", "severity", "reason", "subject", "incarnation", "request_id", "detail", "router")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    seq: int
    time: float
    severity: str
    reason: str
    subject: str
    incarnation: str
    request_id: str
    detail: str
    router: str
    def __init__(self, seq: _Optional[int] = ..., time: _Optional[float] = ..., severity: _Optional[str] = ..., reason: _Optional[str] = ..., subject: _Optional[str] = ..., incarnation: _Optional[str] = ..., request_id: _Optional[str] = ..., detail: _Optional[str] = ..., router: _Optional[str] = ...) -> None: ...
