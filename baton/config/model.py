"""What each process can be told, as small frozen values. The field's name is the key everywhere:

flag          --max-num-seqs 64
environment   BATON_MAX_NUM_SEQS=64
file          max_num_seqs = 64        (baton.toml, at the top or in the command's table)
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ByteSize, ConfigDict, Field, model_validator

import baton
from baton.security.binds import Protection
from baton.security.tls_files import TlsFiles

DEFAULT_CLUSTER = "default"
DEFAULT_GRPC_PORT = 50051
DEFAULT_HTTP_PORT = 8000
DEFAULT_KV_CACHE_MEMORY = ByteSize(256 << 20)
DEFAULT_BLOCK_SIZE = 16
DEFAULT_MAX_NUM_BATCHED_TOKENS = 512
DEFAULT_MAX_NUM_SEQS = 64
DEFAULT_WATERMARK = 0.01
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")


def bundled_model_dir() -> Path:
    """The model that comes with Baton and is served when none is named."""
    return Path(baton.__file__).parent / "demo_model"


def _name(value: str) -> str:
    if value and not _NAME.match(value):
        raise ValueError("up to 64 letters, digits, '_', '.' and '-'")
    return value


def _host_port(value: str) -> str:
    host, mark, port = value.rpartition(":")
    if value and not (mark and host and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError("HOST:PORT")
    return value


Name = Annotated[str, AfterValidator(_name)]
Port = Annotated[int, Field(ge=0, le=65535)]
HostPort = Annotated[str, AfterValidator(_host_port)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Dtype = Literal["auto", "float32", "bfloat16"]
Policy = Literal["fcfs", "priority"]
PreemptionMode = Literal["recompute", "swap", "auto"]
TransferFailure = Literal["reroute", "recompute", "fail"]
Switch = Literal["on", "off"]
KVDigests = Literal["auto", "on", "sampled", "off"]
PlacementPolicy = Literal["cost", "least-loaded", "round-robin"]

MIN_PRIORITY = -(2**31)
POLICY_HELP = "Who is served first: whoever came first (fcfs), or whoever has the smallest priority."
PREEMPTION_HELP = (
    "What becomes of a request's KV when blocks run out: computed again, kept in the host tier, or what costs less."
)
ASYNC_HELP = (
    "Decide the next step while one is computed: the device waits for nobody, a newcomer for one step more. "
    "Outputs are the same."
)
KV_DIGESTS_HELP = (
    "Compare what was pulled with what its prefill node computed, by XXH3 of all blocks (on) or of one in 16 (sampled)."
    " auto: on in memory of the host, sampled on a device."
)
TRANSFER_FAILURE_HELP = (
    "When a prompt's KV does not come: another prefill node, computed by the decode node itself, or the request fails."
)
PLACEMENT_HELP = (
    "Which nodes a request goes to: those that are predicted to cost least (cost; it knows their speed, load and "
    "caches), the least loaded ones, or each in turn."
)
LOCAL_PREFILL_HELP = (
    "With cost: a decode node may compute at most so many tokens of a prompt itself, where that is cheaper than a "
    "hand-off."
)
REQUIRE_DISAGGREGATION_HELP = "on: no node ever computes a prompt and generates from it; requests wait for a pair."
AGEING_HELP = "Seconds of waiting that weigh as much as one step of priority; 0: none ever do."
LONG_PREFILL_HELP = (
    "Tokens of one prompt that a step computes at most, so that others' prompts get their part; 0: no such limit."
)
CHUNKED_PREFILL_HELP = (
    "Compute prompts in pieces beside running streams. Without: each in one step, for which a long one waits, and "
    "max_num_batched_tokens must be at least max_model_len."
)
PREFIX_CACHING_HELP = "Keep the KV of what was computed, for later prompts that begin alike."
WATERMARK_HELP = "Share of the KV blocks that must stay free when a request is let in while others run, 0 to below 1."
MAX_QUEUE_HELP = (
    "Requests for text, and as many for embeddings, that may wait at a router for a node that is not full; beyond it "
    "the least urgent are turned away."
)
MAX_RUNNING_HELP = "Requests of one router that may be on nodes at once; more wait at the router."
ORPHAN_GRACE_HELP = (
    "Seconds that requests run on, and what ended is kept, when their router is lost; another one can adopt them."
)
KV_STALL_HELP = (
    "Seconds without a byte of a prompt's KV, from a prefill node that lives, after which a decode node gives the "
    "transfer up."
)
MIN_PRIORITY_HELP = "Requests with a smaller priority are refused."


INSECURE_HELP = "Listen for others without TLS or keys: on a network where everybody is trusted."
PASSWORD_HELP = "One with a password belongs into BATON_REGISTRY: everybody can read command lines."
API_KEYS_HELP = "File of hashed keys, one of which each caller must show; `baton keys` writes it. Default: no keys."
ALLOWED_HOSTS_HELP = (
    "Names, with commas between them, by which HTTP callers may address this cluster besides those of loopback; "
    "* for any. Default: on a loopback address none, else any."
)


def _check_host_tier(mode: PreemptionMode, memory: ByteSize) -> None:
    if mode == "swap" and not memory:
        raise ValueError("preemption_mode swap needs a host tier: give host_cache_memory a size")


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class _Process(_Config):
    """What every process of a cluster that serves something can be told."""

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    registry: str = Field(
        ...,
        min_length=1,
        description=f"URL of the Redis that the cluster meets in: redis://, rediss:// or unix://. {PASSWORD_HELP}",
    )
    cluster: Name = Field(DEFAULT_CLUSTER, min_length=1, description="Name of the cluster in the registry.")
    model: Path = Field(default_factory=bundled_model_dir, description="Model directory. Default: the bundled model.")
    model_name: Name = Field("", description="What clients call the model. Default: the directory's name.")
    lease_s: Annotated[float, Field(ge=1, le=3600)] = Field(
        5.0, description="Seconds that a crashed process stays in the registry."
    )
    drain_s: Seconds = Field(30.0, description="Seconds that running work may take to end after a request to stop.")
    tls_cert: Path | None = Field(None, description="Certificate of this process, PEM. Default: no TLS.")
    tls_key: Path | None = Field(None, description="Its key, PEM.")
    tls_ca: Path | None = Field(None, description="The authority of all certificates of this cluster, PEM.")
    api_keys: Path | None = Field(None, description=API_KEYS_HELP)
    allowed_hosts: str = Field("", description=ALLOWED_HOSTS_HELP)
    insecure: bool = Field(False, description=INSECURE_HELP)
    notify_fd: int | None = Field(
        None, ge=3, description="Inherited descriptor that gets one JSON line when the process is ready."
    )

    @property
    def tls(self) -> TlsFiles | None:
        """The three files; None without TLS."""
        return TlsFiles.of(self.tls_cert, self.tls_key, self.tls_ca)

    @property
    def protection(self) -> Protection:
        """What it has against strangers."""
        return Protection(self.tls_cert is not None, self.api_keys is not None, self.insecure)

    @model_validator(mode="after")
    def _all_of_tls(self) -> Self:
        TlsFiles.of(self.tls_cert, self.tls_key, self.tls_ca)
        return self

    @property
    def served_model_name(self) -> str:
        """The name under which clients ask for the model."""
        return self.model_name or self.model.resolve().name


class NodeConfig(_Process):
    """One prefill or decode node."""

    role: Literal["prefill", "decode"] = Field(..., description="What the node does: prefill or decode.")
    node_id: Name = Field(..., min_length=1, description="Name of the node, unique in the cluster.")
    port: Port = Field(0, description="Port to listen on; 0 takes a free one.")
    advertise: HostPort = Field("", description="HOST:PORT at which others reach the node. Default: where it listens.")
    metrics_port: Port | None = Field(None, description="Port of the page /metrics; 0 takes a free one. Default: none.")
    dtype: Dtype = Field("auto", description="auto takes bfloat16 where the device computes it natively.")
    device: str = Field("auto", min_length=1, description="auto (a GPU where there is one), cpu, cuda or cuda:N.")
    runner: Literal["torch", "simulated"] = Field("torch", description="simulated needs no model and computes nothing.")
    block_size: Count = Field(DEFAULT_BLOCK_SIZE, description="Tokens in a KV block.")
    kv_cache_memory: ByteSize = Field(DEFAULT_KV_CACHE_MEMORY, gt=0, description="Bytes of KV cache, like 256MiB.")
    host_cache_memory: ByteSize = Field(ByteSize(0), ge=0, description="Bytes of the host tier; 0: there is none.")
    preemption_mode: PreemptionMode = Field("recompute", description=PREEMPTION_HELP)
    async_scheduling: Switch = Field("off", description=ASYNC_HELP)
    kv_digests: KVDigests = Field("auto", description=KV_DIGESTS_HELP)
    on_transfer_failure: TransferFailure = Field("reroute", description=TRANSFER_FAILURE_HELP)
    kv_stall_s: Annotated[float, Field(ge=1, le=3600)] = Field(10.0, description=KV_STALL_HELP)
    orphan_grace_s: Annotated[float, Field(ge=0, le=3600)] = Field(10.0, description=ORPHAN_GRACE_HELP)
    max_num_batched_tokens: Count = Field(DEFAULT_MAX_NUM_BATCHED_TOKENS, description="Tokens computed in one step.")
    max_num_seqs: Count = Field(DEFAULT_MAX_NUM_SEQS, description="Requests that run at once.")
    long_prefill_token_threshold: Annotated[int, Field(ge=0)] = Field(0, description=LONG_PREFILL_HELP)
    enable_chunked_prefill: bool = Field(True, description=CHUNKED_PREFILL_HELP)
    enable_prefix_caching: bool = Field(True, description=PREFIX_CACHING_HELP)
    watermark: Share = Field(DEFAULT_WATERMARK, description=WATERMARK_HELP)
    max_model_len: Count | None = Field(None, description="Longest prompt and output together. Default: the model's.")
    scheduling_policy: Policy = Field("fcfs", description=POLICY_HELP)
    priority_ageing_s: Seconds = Field(60.0, description=AGEING_HELP)
    min_priority: int = Field(MIN_PRIORITY, ge=MIN_PRIORITY, description=MIN_PRIORITY_HELP)
    threads: Count | None = Field(None, description="Threads that compute. Default: every core of the machine.")
    simulated_step_ms: Milliseconds = Field(0.0, description="Simulated runner: time of a step.")
    simulated_prefill_token_ms: Milliseconds = Field(0.0, description="Simulated runner: and of each prompt token.")
    simulated_decode_seq_ms: Milliseconds = Field(0.0, description="Simulated runner: and of each running sequence.")
    failpoints: Path | None = Field(None, description="Directory in which drills ask for faults. Default: none.")

    @property
    def num_threads(self) -> int:
        """`threads`, or one for each core that this process may use."""
        return self.threads or len(os.sched_getaffinity(0))

    @model_validator(mode="after")
    def _consistent(self) -> NodeConfig:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running request computes a token a step"
            )
        _check_host_tier(self.preemption_mode, self.host_cache_memory)
        return self


class RouterConfig(_Process):
    """One router. `model` is where it finds the tokenizer."""

    router_id: Name = Field(..., min_length=1, description="Name of the router, unique in the cluster.")
    grpc_port: Port = Field(DEFAULT_GRPC_PORT, description="Port of the public gRPC service; 0 takes a free one.")
    grpc_server: Literal["own", "grpcio"] = Field(
        "own", description="What serves it: grpcio's server costs several times as much for each message of a stream."
    )
    http_port: Port = Field(
        DEFAULT_HTTP_PORT, description="Port of the OpenAI-compatible HTTP front; 0 takes a free one."
    )
    operator_port: Port = Field(0, description="Port of the operator's gRPC service; 0 takes a free one.")
    advertise_host: str = Field("", description="Name or address at which others reach it. Default: where it listens.")
    runner: Literal["torch", "simulated"] = Field("torch", description="simulated: prompts are token ids only.")
    await_nodes: Annotated[int, Field(ge=0)] = Field(
        0, description="Nodes that must have joined before the router says that it is ready."
    )
    min_priority: int = Field(MIN_PRIORITY, ge=MIN_PRIORITY, description=MIN_PRIORITY_HELP)
    priority_ageing_s: Seconds = Field(60.0, description=AGEING_HELP)
    max_queue: Annotated[int, Field(ge=0)] = Field(1024, description=MAX_QUEUE_HELP)
    placement: PlacementPolicy = Field("cost", description=PLACEMENT_HELP)
    max_local_prefill_tokens: Annotated[int, Field(ge=0)] = Field(512, description=LOCAL_PREFILL_HELP)
    require_disaggregation: Switch = Field("off", description=REQUIRE_DISAGGREGATION_HELP)
    max_running: Count = Field(16_384, description=MAX_RUNNING_HELP)
    flight_record_s: Seconds = Field(
        3600.0,
        description="Seconds that the registry keeps what another router needs to go on with a request; 0: nothing.",
    )


class UpConfig(_Config):
    """A whole cluster on this machine."""

    model: Path = Field(default_factory=bundled_model_dir, description="Model directory. Default: the bundled model.")
    model_name: Name = Field("", description="What clients call the model. Default: the directory's name.")
    dtype: Dtype = Field("auto", description="auto takes bfloat16 where the device computes it natively.")
    device: str = Field("auto", min_length=1, description="auto (a GPU where there is one), cpu, cuda or cuda:N.")
    prefill: Annotated[int, Field(ge=0, le=64)] = Field(1, description="Prefill nodes.")
    decode: Annotated[int, Field(ge=1, le=64)] = Field(1, description="Decode nodes.")
    routers: Annotated[int, Field(ge=1, le=8)] = Field(
        1, description="Routers; clients survive the loss of one of two."
    )
    host: str = Field("127.0.0.1", min_length=1, description="Address that every process listens on.")
    grpc_port: Port = Field(
        DEFAULT_GRPC_PORT,
        description="Port of the public gRPC service, one more for each other router; 0 takes free ones.",
    )
    http_port: Port = Field(
        DEFAULT_HTTP_PORT,
        description="Port of the OpenAI-compatible HTTP front, one more for each other router; 0 takes free ones.",
    )
    metrics_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None, description="Port of the first node's page /metrics, one more for each other node. Default: no pages."
    )
    certs: Path | None = Field(
        None, description="Directory that `baton certs init` made: each process takes its certificate. Default: no TLS."
    )
    api_keys: Path | None = Field(None, description=API_KEYS_HELP)
    allowed_hosts: str = Field("", description=ALLOWED_HOSTS_HELP)
    insecure: bool = Field(False, description=INSECURE_HELP)
    registry: str = Field("", description=f"URL of a running Redis. {PASSWORD_HELP} Default: a private one is started.")
    cluster: Name = Field(DEFAULT_CLUSTER, min_length=1, description="Name of the cluster in the registry.")
    threads: Count | None = Field(None, description="Threads of each node. Default: the cores divided by the nodes.")
    runner: Literal["torch", "simulated"] = Field("torch", description="simulated needs no model and computes nothing.")
    block_size: Count = Field(DEFAULT_BLOCK_SIZE, description="Tokens in a KV block.")
    kv_cache_memory: ByteSize = Field(DEFAULT_KV_CACHE_MEMORY, gt=0, description="KV cache of each node, like 256MiB.")
    host_cache_memory: ByteSize = Field(ByteSize(0), ge=0, description="Host tier of each node; 0: there is none.")
    preemption_mode: PreemptionMode = Field("recompute", description=PREEMPTION_HELP)
    async_scheduling: Switch = Field("off", description=ASYNC_HELP)
    kv_digests: KVDigests = Field("auto", description=KV_DIGESTS_HELP)
    on_transfer_failure: TransferFailure = Field("reroute", description=TRANSFER_FAILURE_HELP)
    kv_stall_s: Annotated[float, Field(ge=1, le=3600)] = Field(10.0, description=KV_STALL_HELP)
    orphan_grace_s: Annotated[float, Field(ge=0, le=3600)] = Field(10.0, description=ORPHAN_GRACE_HELP)
    max_num_batched_tokens: Count = Field(DEFAULT_MAX_NUM_BATCHED_TOKENS, description="Tokens computed in one step.")
    max_num_seqs: Count = Field(DEFAULT_MAX_NUM_SEQS, description="Requests that run at once on a node.")
    long_prefill_token_threshold: Annotated[int, Field(ge=0)] = Field(0, description=LONG_PREFILL_HELP)
    enable_chunked_prefill: bool = Field(True, description=CHUNKED_PREFILL_HELP)
    enable_prefix_caching: bool = Field(True, description=PREFIX_CACHING_HELP)
    watermark: Share = Field(DEFAULT_WATERMARK, description=WATERMARK_HELP)
    max_model_len: Count | None = Field(None, description="Longest prompt and output together. Default: the model's.")
    scheduling_policy: Policy = Field("fcfs", description=POLICY_HELP)
    priority_ageing_s: Seconds = Field(60.0, description=AGEING_HELP)
    min_priority: int = Field(MIN_PRIORITY, ge=MIN_PRIORITY, description=MIN_PRIORITY_HELP)
    max_queue: Annotated[int, Field(ge=0)] = Field(1024, description=MAX_QUEUE_HELP)
    placement: PlacementPolicy = Field("cost", description=PLACEMENT_HELP)
    max_local_prefill_tokens: Annotated[int, Field(ge=0)] = Field(512, description=LOCAL_PREFILL_HELP)
    require_disaggregation: Switch = Field("off", description=REQUIRE_DISAGGREGATION_HELP)
    max_running: Count = Field(16_384, description=MAX_RUNNING_HELP)
    start_timeout_s: Seconds = Field(120.0, description="Seconds that the processes may take to be ready.")
    drain_s: Seconds = Field(30.0, description="Seconds that running work may take to end after a request to stop.")

    @model_validator(mode="after")
    def _consistent(self) -> UpConfig:
        _check_host_tier(self.preemption_mode, self.host_cache_memory)
        for name, port in (("grpc_port", self.grpc_port), ("http_port", self.http_port)):
            if port + self.routers > 65536:
                raise ValueError(f"{name} {port} leaves no ports for {self.routers} routers")
        return self

    @property
    def protection(self) -> Protection:
        """What its processes have against strangers."""
        return Protection(self.certs is not None, self.api_keys is not None, self.insecure)

    def threads_per_node(self, cores: int) -> int:
        """Threads for each of the nodes on a machine of so many cores; at least one."""
        return self.threads or max(1, cores // (self.prefill + self.decode))
