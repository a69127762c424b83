"""The settings of offline use: those of a node's engine, and sampling parameters, with the defaults of a cluster."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypedDict

from pydantic import ConfigDict, TypeAdapter, ValidationError

from baton.config import NodeConfig
from baton.config.kinds import Dtype, KVCacheDtype
from baton.did_you_mean import did_you_mean
from baton.errors import ConfigError, InvalidRequest
from baton.messages.generation import GenerateRequest
from baton.messages.sampling import RepetitionDetection


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


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when the output ends. None stands for the default of a cluster.

    Their ranges are checked by `LLM.generate`, which raises InvalidRequest. What each field means stands at the field
    of the same name in `baton/messages/sampling.py`, and in vLLM's documentation.
    """

    __pydantic_config__ = ConfigDict(strict=True, revalidate_instances="always")

    temperature: float | None = None
    """0: greedy. Default: the model's own (generation_config.json), else 1; so also top_p, top_k, min_p and
    repetition_penalty, which are off otherwise."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    top_n_sigma: float | None = None
    seed: int | None = None
    """With the same seed a request has the same tokens, offline and in a cluster. Default: drawn (see `LLM`)."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """A number that is added to the logit of a token, by token id."""
    allowed_token_ids: Sequence[int] = ()
    """The only tokens that may be sampled. Default: all."""
    bad_words: Sequence[str] = ()
    """Texts that the output must not contain."""
    max_tokens: int | None = None
    """The most tokens of the output. Default: 16; of a chat, as many as the model takes."""
    min_tokens: int | None = None
    stop: str | Sequence[str] = ()
    """Strings that end the output, which does not contain them."""
    include_stop_str_in_output: bool | None = None
    """Whether the output contains the stop string that ended it. Default: no."""
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    logprobs: int | None = None
    """How many of the most likely tokens are returned for each position, with log-probabilities. None: nothing is; 0:
    those of the sampled tokens alone."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens from the second one on."""
    n: int | None = None
    """Outputs for each prompt. Default: 1."""
    best_of: int | None = None
    """Outputs that are generated; the `n` most likely ones are returned. Default: `n`."""
    beam_width: int | None = None
    """Beams of a beam search. Default: none."""
    length_penalty: float | None = None
    early_stopping: bool | None = None
    json_schema: str | Mapping[str, Any] | None = None
    """The JSON schema that the output must satisfy, as text or as a dictionary."""
    regex: str | None = None
    """The regular expression that the whole output must match."""
    choice: Sequence[str] = ()
    """The texts of which the output must be one."""
    grammar: str | None = None
    """The context-free grammar, in Lark's notation or in GBNF, that the output must follow."""
    repetition_detection: RepetitionDetection | None = None
    speculation: bool | None = None
    """False: tokens are not drafted, where the engine drafts some; they are the same either way."""

    def request(self, prompt: str | Sequence[int]) -> GenerateRequest:
        """The request that a client with these parameters would send. Raises InvalidRequest for a wrong type."""
        try:
            _TYPES.validate_python(self)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            message = first["msg"].replace("Input should be", "must be")
            raise InvalidRequest(str(first["loc"][0]) if first["loc"] else "sampling_params", message) from None
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        schema = self.json_schema
        return GenerateRequest(
            prompt,
            **values
            | {
                "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
                "choice": tuple(self.choice),
                "allowed_token_ids": tuple(self.allowed_token_ids),
                "bad_words": tuple(self.bad_words),
                "logit_bias": dict(self.logit_bias),
                "json_schema": json.dumps(schema) if isinstance(schema, Mapping) else schema,
            },
        )


_TYPES = TypeAdapter(SamplingParams)
