"""The settings of `baton up`: those of nodes and routers, which it passes to them, and its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from baton.config.kinds import Count, Seconds
from baton.config.node import NodeSettings
from baton.config.router import RouterSettings
from baton.messages.kv_cache import block_sizes_fit
from baton.security.binds import Protection


class UpConfig(RouterSettings, NodeSettings):
    """The settings of a whole cluster on this machine."""

    heading: ClassVar[str] = "The cluster"

    prefill: Annotated[int, Field(ge=0, le=64)] = Field(1, description="Number of prefill nodes.")
    decode: Annotated[int, Field(ge=1, le=64)] = Field(1, description="Number of decode nodes.")
    encode: Annotated[int, Field(ge=0, le=64)] = Field(
        0,
        description="Number of encode nodes, for a model that takes images or speech: they have its encoder alone, and "
        "spare prefill nodes that work.",
    )
    prefill_tp: Annotated[int, Field(ge=1, le=64)] | None = Field(None, description="tp of prefill nodes. Default: tp.")
    decode_tp: Annotated[int, Field(ge=1, le=64)] | None = Field(None, description="tp of decode nodes. Default: tp.")
    prefill_pp: Annotated[int, Field(ge=1, le=64)] | None = Field(None, description="pp of prefill nodes. Default: pp.")
    decode_pp: Annotated[int, Field(ge=1, le=64)] | None = Field(None, description="pp of decode nodes. Default: pp.")
    prefill_hosts: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="Hosts that compute each prefill node, one stage each. More than one needs --emit helm or slurm."
    )
    decode_hosts: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="Hosts that compute each decode node, one stage each. More than one needs --emit helm or slurm."
    )
    prefill_block_size: Count | None = Field(
        None,
        description="block_size of prefill nodes. Default: block_size. It must divide that of decode nodes, or be "
        "divided by it, and equal it for a model that keeps states.",
    )
    decode_block_size: Count | None = Field(None, description="block_size of decode nodes. Default: block_size.")
    prefill_max_num_batched_tokens: Count | None = Field(
        None, description="max_num_batched_tokens of prefill nodes. Default: max_num_batched_tokens."
    )
    decode_max_num_batched_tokens: Count | None = Field(
        None, description="max_num_batched_tokens of decode nodes. Default: max_num_batched_tokens."
    )
    routers: Annotated[int, Field(ge=1, le=8)] = Field(
        1, description="Number of routers; clients survive the loss of one of two."
    )
    registry: str = Field(
        "",
        description="URL of a Redis that runs already; one with a password belongs in BATON_REGISTRY. Default: a "
        "private Redis is started.",
    )
    certs: Path | None = Field(
        None,
        description="Directory that `baton certs init` made, with a certificate for each process. Default: no TLS.",
    )
    start_timeout_s: Seconds = Field(120.0, description="Seconds within which all processes must be ready.")

    @model_validator(mode="after")
    def _nodes_can_exchange_kv(self) -> Self:
        prefill, decode = self.prefill_block_size or self.block_size, self.decode_block_size or self.block_size
        if not block_sizes_fit(prefill, decode):
            raise ValueError(
                f"prefill_block_size {prefill} and decode_block_size {decode}: one must divide the other, or no "
                "prefill node could hand over to a decode node"
            )
        return self

    @model_validator(mode="after")
    def _one_stage_a_host(self) -> Self:
        for role, hosts, pp in (
            ("prefill", self.prefill_hosts, self.prefill_pp or self.pp),
            ("decode", self.decode_hosts, self.decode_pp or self.pp),
        ):
            if hosts > 1 and pp > 1:
                raise ValueError(
                    f"{role}_hosts is {hosts}, and {role} nodes have pp {pp}: a node on several hosts has one stage on "
                    f"each, so leave {role}_pp at 1"
                )
        return self

    @model_validator(mode="after")
    def _enough_ports(self) -> Self:
        nodes = self.num_nodes
        for name, first, count, processes in (
            ("grpc_port", self.grpc_port, self.routers, "routers"),
            ("http_port", self.http_port, self.routers, "routers"),
            ("metrics_port", self.metrics_port or 0, nodes, "nodes"),
        ):
            if first + count > 65536:
                raise ValueError(f"{name} {first} leaves no ports for {count} {processes}")
        return self

    @property
    def num_nodes(self) -> int:
        """Nodes of all roles."""
        return self.prefill + self.decode + self.encode

    @property
    def is_across_hosts(self) -> bool:
        """Whether a node is computed by several hosts."""
        return max(self.prefill_hosts, self.decode_hosts) > 1

    @property
    def protection(self) -> Protection:
        """The protection of the cluster's processes against unknown callers."""
        return Protection(self.certs is not None, self.api_keys is not None, self.insecure)

    def threads_per_node(self, cores: int) -> int:
        """Threads for each node on a machine with this number of cores; at least one."""
        return self.threads or max(1, cores // self.num_nodes)
