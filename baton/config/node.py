"""The settings of each process, as frozen models. A setting is written here and nowhere else.

From a field follow its flag, its environment variable, its key in the configuration file, its row in `baton config
view` and in docs/configuration.md, and its way from `baton up` to the processes that it concerns:

flag          --max-num-seqs 64
environment   BATON_MAX_NUM_SEQS=64
file          max_num_seqs = 64        (baton.toml, at the top or in the command's table)

`ClusterSettings`, `NodeSettings` and `RouterSettings` can be given to `baton up`, which passes them on to all
processes, to the nodes and to the routers. The other settings differ between the processes of one cluster.
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
MIN_PRIORITY = -(2**31)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
_REGISTRY_HELP = (
    "URL of the Redis that is the cluster's registry: redis://, rediss:// or unix://. "
    "Set a URL with a password in BATON_REGISTRY, since other users can read command lines."
)


def bundled_model_dir() -> Path:
    """The directory of the model that comes with Baton and is served by default."""
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


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ClusterSettings(_Config):
    """Settings of all processes of a cluster."""

    host: str = Field("127.0.0.1", min_length=1, description="Address that each process listens on.")
    cluster: Name = Field(DEFAULT_CLUSTER, min_length=1, description="Name of the cluster in the registry.")
    model: Path = Field(
        default_factory=bundled_model_dir,
        description="Model directory; routers read the tokenizer from it. Default: the bundled model.",
    )
    model_name: Name = Field("", description="Name of the model for clients. Default: the directory's name.")
    runner: Literal["torch", "simulated"] = Field(
        "torch",
        description="simulated needs no model and computes nothing; its prompts are token ids only.",
    )
    priority_ageing_s: Seconds = Field(
        60.0,
        description="Seconds of waiting that count as much as one step of priority; 0: waiting does not count.",
    )
    min_priority: int = Field(
        MIN_PRIORITY, ge=MIN_PRIORITY, description="Requests with a smaller priority are refused."
    )
    drain_s: Seconds = Field(30.0, description="Seconds that running requests get to end when a process is stopped.")
    api_keys: Path | None = Field(
        None,
        description="File with the hashes of API keys, one of which each caller must show; `baton keys` writes it. "
        "Default: no keys.",
    )
    allowed_hosts: str = Field(
        "",
        description="Host names, separated by commas, under which HTTP clients may call this cluster in addition to "
        "those of loopback; * for any. Default: none if --host is a loopback address, any otherwise.",
    )
    insecure: bool = Field(
        False,
        description="Listen on other addresses than loopback without TLS or keys, in a network that is trusted.",
    )

    @property
    def served_model_name(self) -> str:
        """The name under which clients ask for the model."""
        return self.model_name or self.model.resolve().name


class NodeSettings(_Config):
    """Settings of nodes."""

    dtype: Dtype = Field("auto", description="Number format; auto: bfloat16 where the device computes it natively.")
    device: str = Field("auto", min_length=1, description="auto (a GPU if there is one), cpu, cuda or cuda:N.")
    block_size: Count = Field(16, description="Tokens in a KV block.")
    kv_cache_memory: ByteSize = Field(
        DEFAULT_KV_CACHE_MEMORY, gt=0, description="Size of a node's KV cache, like 256MiB."
    )
    host_cache_memory: ByteSize = Field(
        ByteSize(0), ge=0, description="Size of a node's host tier, like 4GiB; 0: there is none."
    )
    preemption_mode: PreemptionMode = Field(
        "recompute",
        description="What happens to the KV of a request that is preempted because blocks run out: it is computed "
        "again (recompute), kept in the host tier (swap), or whichever is expected to cost less (auto).",
    )
    async_scheduling: Switch = Field(
        "off",
        description="on: the scheduler decides the next step while one is computed. The device does not wait, and a "
        "new request waits for one step more. The tokens are the same.",
    )
    kv_digests: KVDigests = Field(
        "auto",
        description="Compare received KV with what the prefill node computed, by XXH3 of all blocks (on) or of one "
        "block in 16 (sampled). auto: on for KV in host memory, sampled on a device.",
    )
    on_transfer_failure: TransferFailure = Field(
        "reroute",
        description="When the KV of a prompt does not arrive, another prefill node computes it (reroute), the decode "
        "node computes it (recompute), or the request fails (fail).",
    )
    kv_stall_s: Annotated[float, Field(ge=1, le=3600)] = Field(
        10.0,
        description="Seconds without a byte of a prompt's KV from a live prefill node after which a decode node gives "
        "up the transfer.",
    )
    orphan_grace_s: Annotated[float, Field(ge=0, le=3600)] = Field(
        10.0,
        description="Seconds that requests continue, and finished ones are kept, after the loss of their router, so "
        "that another router can adopt them.",
    )
    max_num_batched_tokens: Count = Field(512, description="Most tokens that a step computes.")
    max_num_seqs: Count = Field(64, description="Most requests that run at once on a node.")
    long_prefill_token_threshold: Annotated[int, Field(ge=0)] = Field(
        0,
        description="Most tokens of one prompt that a step computes, so that other prompts get a share; 0: no limit.",
    )
    enable_chunked_prefill: bool = Field(
        True,
        description="Compute prompts in pieces, next to running streams. Without it each prompt is computed in one "
        "step, and max_num_batched_tokens must be at least max_model_len.",
    )
    enable_prefix_caching: bool = Field(
        True, description="Keep computed KV for later prompts that begin with the same tokens."
    )
    watermark: Share = Field(
        0.01,
        description="Share of the KV blocks that must stay free when a request is admitted while others run, from 0 to "
        "below 1.",
    )
    max_model_len: Count | None = Field(
        None, description="Most tokens of a prompt and its output together. Default: the model's limit."
    )
    scheduling_policy: Policy = Field(
        "fcfs",
        description="Which request is served first: the first to arrive (fcfs), or the one with the smallest priority.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running request computes a token a step"
            )
        if self.preemption_mode == "swap" and not self.host_cache_memory:
            raise ValueError("preemption_mode swap needs a host tier: give host_cache_memory a size")
        return self


class RouterSettings(_Config):
    """Settings of routers."""

    max_queue: Annotated[int, Field(ge=0)] = Field(
        1024,
        description="Most requests for text, and as many for embeddings, that wait at a router for a free node. When "
        "there are more, the least urgent ones are refused.",
    )
    max_running: Count = Field(
        16_384, description="Most requests of one router that are on nodes at once; more wait at the router."
    )
    placement: PlacementPolicy = Field(
        "cost",
        description="How nodes are chosen for a request: by the lowest predicted cost from speed, load and caches "
        "(cost), by the lowest load (least-loaded), or in turn (round-robin).",
    )
    max_local_prefill_tokens: Annotated[int, Field(ge=0)] = Field(
        512,
        description="With cost: most tokens of a prompt that a decode node may compute itself where that is cheaper "
        "than a hand-off.",
    )
    require_disaggregation: Switch = Field(
        "off",
        description="on: no node computes a prompt and also generates from it; requests wait for a pair of nodes.",
    )


class _Process(ClusterSettings):
    registry: str = Field(..., min_length=1, description=_REGISTRY_HELP)
    lease_s: Annotated[float, Field(ge=1, le=3600)] = Field(
        5.0, description="Seconds that a crashed process stays in the registry."
    )
    tls_cert: Path | None = Field(None, description="Certificate of this process, PEM. Default: no TLS.")
    tls_key: Path | None = Field(None, description="Key of the certificate, PEM.")
    tls_ca: Path | None = Field(None, description="Certificate authority of all certificates of this cluster, PEM.")
    notify_fd: int | None = Field(
        None, ge=3, description="Inherited descriptor that gets one JSON line when the process is ready."
    )

    @property
    def tls(self) -> TlsFiles | None:
        """The three files; None without TLS."""
        return TlsFiles.of(self.tls_cert, self.tls_key, self.tls_ca)

    @property
    def protection(self) -> Protection:
        """The protection of the process against unknown callers."""
        return Protection(self.tls_cert is not None, self.api_keys is not None, self.insecure)

    @model_validator(mode="after")
    def _all_of_tls(self) -> Self:
        TlsFiles.of(self.tls_cert, self.tls_key, self.tls_ca)
        return self


class _NodeProcess(_Process):
    role: Literal["prefill", "decode"] = Field(..., description="Role of the node: prefill or decode.")
    node_id: Name = Field(..., min_length=1, description="Name of the node, unique in the cluster.")
    port: Port = Field(0, description="Port to listen on; 0: a free one.")
    advertise: HostPort = Field("", description="HOST:PORT at which others reach the node. Default: where it listens.")
    metrics_port: Port | None = Field(None, description="Port of the page /metrics; 0: a free one. Default: no page.")
    threads: Count | None = Field(None, description="Threads that compute. Default: one for each core.")
    simulated_step_ms: Milliseconds = Field(0.0, description="Simulated runner: milliseconds per step.")
    simulated_prefill_token_ms: Milliseconds = Field(
        0.0, description="Simulated runner: milliseconds per prompt token, in addition."
    )
    simulated_decode_seq_ms: Milliseconds = Field(
        0.0, description="Simulated runner: milliseconds per running sequence, in addition."
    )
    failpoints: Path | None = Field(None, description="Directory in which fault drills ask for faults. Default: none.")

    @property
    def num_threads(self) -> int:
        """`threads`, or one for each core that this process may use."""
        return self.threads or len(os.sched_getaffinity(0))


class NodeConfig(NodeSettings, _NodeProcess):
    """The settings of one prefill or decode node."""


class _RouterProcess(_Process):
    router_id: Name = Field(..., min_length=1, description="Name of the router, unique in the cluster.")
    grpc_port: Port = Field(DEFAULT_GRPC_PORT, description="Port of the public gRPC service; 0: a free one.")
    grpc_server: Literal["own", "grpcio"] = Field(
        "own", description="gRPC server of the public service: Baton's own, or grpcio's, which is several times slower."
    )
    http_port: Port = Field(DEFAULT_HTTP_PORT, description="Port of the OpenAI-compatible HTTP service; 0: a free one.")
    operator_port: Port = Field(0, description="Port of the operator's gRPC service; 0: a free one.")
    advertise_host: str = Field("", description="Host at which others reach the router. Default: where it listens.")
    await_nodes: Annotated[int, Field(ge=0)] = Field(
        0, description="Number of nodes that must have joined before the router reports that it is ready."
    )
    flight_record_s: Seconds = Field(
        3600.0,
        description="Seconds that the registry keeps the record of a request, from which another router can continue "
        "it; 0: no records.",
    )


class RouterConfig(RouterSettings, _RouterProcess):
    """The settings of one router."""


class _Launch(ClusterSettings):
    prefill: Annotated[int, Field(ge=0, le=64)] = Field(1, description="Number of prefill nodes.")
    decode: Annotated[int, Field(ge=1, le=64)] = Field(1, description="Number of decode nodes.")
    routers: Annotated[int, Field(ge=1, le=8)] = Field(
        1, description="Number of routers; clients survive the loss of one of two."
    )
    grpc_port: Port = Field(
        DEFAULT_GRPC_PORT,
        description="Port of the first router's public gRPC service; the others take the next ones. 0: free ones.",
    )
    http_port: Port = Field(
        DEFAULT_HTTP_PORT,
        description="Port of the first router's OpenAI-compatible HTTP service; the others take the next ones. 0: free "
        "ones.",
    )
    metrics_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None, description="Port of the first node's page /metrics; the others take the next ones. Default: no pages."
    )
    certs: Path | None = Field(
        None,
        description="Directory that `baton certs init` made, with a certificate for each process. Default: no TLS.",
    )
    registry: str = Field("", description=f"{_REGISTRY_HELP} Default: a private Redis is started.")
    threads: Count | None = Field(
        None, description="Threads that compute on each node. Default: the cores divided by the number of nodes."
    )
    start_timeout_s: Seconds = Field(120.0, description="Seconds within which all processes must be ready.")


class UpConfig(RouterSettings, NodeSettings, _Launch):
    """The settings of a whole cluster on this machine."""

    @model_validator(mode="after")
    def _enough_ports(self) -> Self:
        for name, port in (("grpc_port", self.grpc_port), ("http_port", self.http_port)):
            if port + self.routers > 65536:
                raise ValueError(f"{name} {port} leaves no ports for {self.routers} routers")
        return self

    @property
    def protection(self) -> Protection:
        """The protection of the cluster's processes against unknown callers."""
        return Protection(self.certs is not None, self.api_keys is not None, self.insecure)

    def threads_per_node(self, cores: int) -> int:
        """Threads for each node on a machine with this number of cores; at least one."""
        return self.threads or max(1, cores // (self.prefill + self.decode))
