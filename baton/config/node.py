"""The settings of nodes. A new setting of nodes is one field of `NodeSettings`.

From the field are derived the setting's flag, its environment variable, its key in the configuration file, its row in
`baton config view` and in docs/configuration.md, and the flag with which `baton up` passes it to each node. Example:

flag          --max-num-seqs 64
environment   BATON_MAX_NUM_SEQS=64
file          max_num_seqs = 64        (baton.toml, at the top or in the command's table)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import ByteSize, Field, model_validator

from baton.config.cluster import ClusterSettings, ProcessSettings
from baton.config.kinds import (
    AdapterDirectories,
    Count,
    CountOrZero,
    Dtype,
    HostPort,
    Internal,
    KVCacheDtype,
    KVDigests,
    Milliseconds,
    Name,
    OnGpu,
    Port,
    SecondsFromOneToAnHour,
    SecondsToAnHour,
    Share,
    SpeculativeConfig,
    parts_of,
)
from baton.config.setting import settings_of
from baton.model_formats.adapters import DEFAULT_MAX_RANK, MAX_RANK


class NodeSettings(ClusterSettings):
    """The settings that all nodes of a cluster share. `baton up` has a flag for each of them, too."""

    heading: ClassVar[str] = "Every node"

    dtype: Dtype = Field("auto", description="Number format; auto: bfloat16 where the device computes it natively.")
    quantization: Literal["off", "int8", "int4"] = Field(
        "off",
        description="Quantise the weights of a plain checkpoint while it is loaded: int8 (8.5 bits a weight) or int4 "
        "(4.5 bits); off: they stay as they are.",
    )
    dequantize: bool = Field(
        False,
        description="Make the weights of a quantised checkpoint plain while it is loaded, in the node's dtype.",
    )
    allow_unverified: bool = Field(
        False,
        description="Serve a model without comparing its logits with those of transformers at start. `baton describe "
        "node` and a metric say so.",
    )
    device: str = Field("auto", min_length=1, description="auto (a GPU if there is one), cpu, cuda or cuda:N.")
    threads: Count | None = Field(
        None,
        description="Threads that compute on a node. Default: one for each core; `baton up` divides the cores among "
        "its nodes.",
    )
    tp: Annotated[int, Field(ge=1, le=64)] = Field(
        1,
        description="Processes that compute a node's model together, each its own columns of every product and its own "
        "attention heads (tensor parallelism). They share its threads and its KV cache. The tokens are the same.",
    )
    pp: Annotated[int, Field(ge=1, le=64)] = Field(
        1,
        description="Stages that compute a node's model one behind the other, each its own layers (pipeline "
        "parallelism): on CPUs on as many processes as `tp` says, on GPUs each on a GPU. They compute as many parts of "
        "the work at once. The tokens are the same.",
    )
    metrics_port: Port | None = Field(
        None,
        description="Port of a node's page /metrics; 0: a free one. Further nodes of `baton up` take the next ports. "
        "Default: no page.",
    )
    block_size: Annotated[Count, OnGpu(64, "64")] = Field(
        16, description="Tokens in a KV block; more where the model keeps large states."
    )
    kv_cache_memory: Annotated[ByteSize, OnGpu(0, "0.9 of what is free beside the weights and a step")] = Field(
        ByteSize(256 << 20), gt=0, description="Size of a node's KV cache, such as 256MiB."
    )
    kv_cache_dtype: KVCacheDtype = Field(
        "auto",
        description="What the KV cache holds: numbers of the model's format (auto), or 8 bits for each number and a "
        "scale for each key and value of a head, which halves the cache and what is moved, and rounds.",
    )
    host_cache_memory: ByteSize = Field(
        ByteSize(0), ge=0, description="Size of a node's host tier, such as 4GiB; 0: there is none."
    )
    preemption_mode: Literal["recompute", "swap", "auto"] = Field(
        "recompute",
        description="What happens to the KV of a request that is preempted because blocks run out: it is computed "
        "again (recompute), kept in the host tier (swap), or whichever is expected to cost less (auto).",
    )
    async_scheduling: Literal["auto", "on", "off"] = Field(
        "auto",
        description="on: the scheduler decides the next step while one is computed. The device does not wait, and a "
        "new request waits for one step more. auto: on with several stages (pp), which would wait at the end of each "
        "step, and otherwise off. The tokens are the same.",
    )
    speculative_config: SpeculativeConfig = Field(
        "",
        description='Speculative decoding with unchanged tokens, as a JSON object. {"method": "ngram"}: tokens are '
        'drafted from what followed the same ones before, and from grammars; {"method": "grammar"}: from grammars '
        'alone; {"model": "NAME"}: by a smaller model with the same tokens, named as in --model, which every node with '
        "this setting loads, and whose KV is part of kv_cache_memory. "
        "Further keys: num_speculative_tokens (most drafts of a request in a step), prompt_lookup_min, "
        "prompt_lookup_max, quantization (of the smaller model: int8 or int4). Empty: no drafts.",
    )
    kv_digests: KVDigests = Field(
        "on",
        description="Compare received KV with what the prefill node computed, by XXH3 of all blocks (on) or of one "
        "block in 16 (sampled). The digests of KV on a GPU are computed there.",
    )
    on_transfer_failure: Literal["reroute", "recompute", "fail"] = Field(
        "reroute",
        description="When the KV of a prompt does not arrive, another prefill node computes it (reroute), the decode "
        "node computes it (recompute), or the request fails (fail).",
    )
    kv_stall_s: SecondsFromOneToAnHour = Field(
        10.0,
        description="Seconds without a byte of a prompt's KV from a live prefill node after which a decode node gives "
        "up the transfer.",
    )
    kv_unclaimed_s: SecondsFromOneToAnHour = Field(
        60.0,
        description="Seconds that a prefill node keeps the KV of a computed prompt that no decode node asks for or "
        "expects.",
    )
    orphan_grace_s: SecondsToAnHour = Field(
        10.0,
        description="Seconds that requests continue, and finished ones are kept, after the loss of their router, so "
        "that another router can adopt them.",
    )
    max_num_batched_tokens: Annotated[Count, OnGpu(8192, "8192")] = Field(
        512,
        description="Most tokens that a step computes. Fewer than max_num_seqs: most tokens of prompts, beside one of "
        "each stream.",
    )
    num_encoder_rows: CountOrZero = Field(
        16384,
        description="Most rows of encoded images, speech or texts that a node keeps, for a model that takes them: "
        "those of one must fit. 0: no images are taken; a model with an encoder and a decoder has room for one input.",
    )
    max_num_seqs: Annotated[Count, OnGpu(256, "256")] = Field(
        64, description="Most requests that run at once on a node."
    )
    long_prefill_token_threshold: CountOrZero = Field(
        0,
        description="Most tokens of one prompt that a step computes, so that other prompts get a share; 0: no limit.",
    )
    enable_chunked_prefill: bool = Field(
        True,
        description="Compute prompts in pieces, next to running streams. Without it each prompt is computed in one "
        "step (unless its log-probabilities are wanted), and max_num_batched_tokens must be at least max_model_len.",
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
    lora_dir: AdapterDirectories = Field(
        "",
        description="Directories in and below which a node reads adapters (LoRA) that operators load while it runs. "
        "The flag may be given several times; elsewhere commas separate them. Default: none but those of lora_modules.",
    )
    max_loras: Count = Field(8, description="Most different adapters of the requests that run at once on a node.")
    max_lora_rank: Annotated[int, Field(ge=1, le=MAX_RANK)] = Field(
        DEFAULT_MAX_RANK, description="Highest rank of an adapter; those of a higher rank are refused."
    )
    max_cpu_loras: Count = Field(
        32,
        description="Most adapters in a node's memory, at least max_loras. Others are read again when a request needs "
        "them, in place of the one that was used least recently.",
    )
    scheduling_policy: Literal["turns", "fcfs", "priority"] = Field(
        "turns",
        description="Which request is served first: the one whose turn is first by its tenant's share, as routers tell "
        "it, and otherwise the first to arrive (turns); the first to arrive (fcfs); or the one with the smallest "
        "priority.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras ({self.max_cpu_loras}) must be at least max_loras ({self.max_loras}): adapters of "
                "running requests are in memory"
            )
        if self.preemption_mode == "swap" and not self.host_cache_memory:
            raise ValueError("preemption_mode swap needs a host tier: give host_cache_memory a size")
        return self

    @property
    def adapter_directories(self) -> Sequence[Path]:
        """The directories in and below which adapters are read."""
        return [Path(directory) for directory in (*parts_of(self.lora_dir), *self.adapter_modules.values())]


class NodeConfig(NodeSettings, ProcessSettings):
    """All settings of one prefill, decode or encode node, including those that only `baton node` has."""

    heading: ClassVar[str] = "This node"

    role: Literal["prefill", "decode", "encode"] = Field(
        ...,
        description="Role of the node. encode: it loads the model's encoder alone, and makes rows of images, speech or "
        "texts for the others.",
    )
    node_id: Name = Field(..., min_length=1, description="Name of the node, unique in the cluster.")
    port: Port = Field(0, description="Port to listen on; 0: a free one.")
    advertise: HostPort = Field("", description="HOST:PORT at which others reach the node. Default: where it listens.")
    hosts: Annotated[int, Field(ge=1, le=64)] = Field(
        1,
        description="Hosts that compute this node's model, one stage each, of `tp` ranks: every one runs `baton node` "
        "with the same settings, a copy of the model, and its own `host_rank`. The tokens are the same.",
    )
    host_rank: Annotated[int, Field(ge=0, le=63)] = Field(
        0,
        description="Number of this host among them. Host 0 has the node's address; the others compute for it, and end "
        "when it does.",
    )
    first_host: HostPort = Field(
        "",
        description="HOST:PORT where host 0 waits for the others, which connect to it with their certificates. Needed "
        "with several hosts.",
    )
    simulated_step_ms: Milliseconds = Field(0.0, description="Milliseconds of a step of the simulated runner.")
    simulated_prefill_token_ms: Milliseconds = Field(
        0.0, description="Milliseconds that each prompt token adds to a step of the simulated runner."
    )
    simulated_decode_seq_ms: Milliseconds = Field(
        0.0, description="Milliseconds that each running sequence adds to a step of the simulated runner."
    )
    gpu_sharers: Annotated[Count, Internal] = Field(
        1, description="Nodes that `baton up` starts on this node's GPU, each of which takes an equal part of it."
    )
    failpoints: Path | None = Field(
        None, description="Directory whose files request faults, for fault injection. Default: no fault injection."
    )

    def on_gpu(self) -> Self:
        """The settings of a node that computes on a GPU: those that nobody gave have a GPU's defaults.

        `kv_cache_memory` is then 0, which stands for as much as the GPU has left.
        """
        marks = {key: setting.on_gpu for key, setting in settings_of(type(self)).items()}
        missing = marks.keys() - self.model_fields_set
        return self.model_copy(
            update={key: mark.default for key, mark in marks.items() if mark is not None and key in missing}
        )

    @property
    def num_stages(self) -> int:
        """Stages that compute the model; each host has one."""
        return max(self.pp, self.hosts)

    @property
    def first_host_address(self) -> tuple[str, int]:
        """Host and port of `first_host`, which is set."""
        host, _, port = self.first_host.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def schedules_ahead(self) -> bool:
        """Whether the next step is decided while one is computed."""
        return self.async_scheduling == "on" or (self.async_scheduling == "auto" and self.num_stages > 1)

    @property
    def num_threads(self) -> int:
        """`threads`, or one for each core that this process may use."""
        return self.threads or len(os.sched_getaffinity(0))
