"""The engine's settings that offline use has: those of a node, under the same names and with the same defaults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, TypedDict

from pydantic import ValidationError

from baton.config import NodeConfig
from baton.config.kinds import Dtype, KVCacheDtype
from baton.did_you_mean import did_you_mean
from baton.errors import ConfigError


class EngineSettings(TypedDict, total=False):
    """Settings of nodes that concern the engine alone; docs/configuration.md describes each."""

    model_name: str
    dtype: Dtype
    quantization: Literal["off", "int8", "int4"]
    dequantize: bool
    allow_unverified: bool
    device: str
    threads: int | None
    tp: int
    pp: int
    block_size: int
    kv_cache_memory: int | str
    kv_cache_dtype: KVCacheDtype
    host_cache_memory: int | str
    preemption_mode: Literal["recompute", "swap", "auto"]
    async_scheduling: Literal["auto", "on", "off"]
    speculative_config: str
    max_num_batched_tokens: int
    max_num_seqs: int
    long_prefill_token_threshold: int
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    watermark: float
    max_model_len: int | None
    lora_modules: str
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int


_OF_NO_CLUSTER = {"role": "decode", "node_id": "offline", "registry": "none"}
"""What every node needs to be in a cluster, and nothing reads here."""


def node_config(model: str | os.PathLike[str], settings: EngineSettings) -> NodeConfig:
    """The configuration of a node with these settings. Neither environment nor configuration file is read.

    Raises ConfigError that names the setting, for an unknown name, a wrong value or a contradiction.
    """
    known = EngineSettings.__annotations__.keys()
    for name in settings:
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}{did_you_mean(name, known)}")
    values: dict[str, Any] = {**_OF_NO_CLUSTER, "model": Path(model), **settings}
    try:
        return NodeConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name, reason = ".".join(map(str, first["loc"][:1])), first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{name} {first['input']!r:.80}: {reason}" if name else reason) from None
