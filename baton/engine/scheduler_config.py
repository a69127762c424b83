"""The scheduler's limits and policies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from baton.errors import ConfigError
from baton.messages.speculation import SpeculationConfig
from baton.values import value


@value(frozen=True, slots=True)
class LongSequences:
    """Which sequences of a model are long."""

    most_short: int
    """The most tokens of a short sequence."""
    starts_over: bool
    """Whether a short sequence that has grown beyond this is computed again, as a long one."""

    def is_long(self, num_prompt_tokens: int, num_tokens: int) -> bool:
        """Whether all positions of a sequence have the angles of long ones. `num_tokens`: with its output so far."""
        return (num_tokens if self.starts_over else num_prompt_tokens) > self.most_short

    def long_from(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """The first position of a sequence that has the angles of long ones."""
        return 0 if self.is_long(num_prompt_tokens, num_tokens) else self.most_short


PreemptionMode = Literal["recompute", "swap", "auto"]
SchedulingPolicy = Literal["turns", "fcfs", "priority"]
TransferFailurePolicy = Literal["reroute", "recompute", "fail"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policies of one engine. Raises ConfigError for values out of bounds and for contradictions."""

    num_blocks: int
    """Number of blocks in the KV cache, the null block 0 included."""
    block_size: int = 16
    """Tokens in a block."""
    max_num_batched_tokens: int = 2048
    """The most tokens that one step computes; where it is less than `max_num_seqs`, the most tokens of prompts beside
    one token of each stream."""
    max_num_seqs: int = 128
    """The most requests that run at a time; as many more may wait, with blocks, for KV from another node."""
    max_model_len: int = 4096
    """The most tokens of one request, prompt and output together."""
    long_prefill_token_threshold: int = 0
    """The most tokens of one request that one step computes; 0: no such limit."""
    watermark: float = 0.01
    """Share of the blocks that must stay free when a request is admitted while others run."""
    windows: tuple[int | None, ...] = (None,)
    """For each group of layers, the most keys that a query attends to, its own included; None: all of them. Blocks that
    a window has passed are freed."""
    keeps_states: bool = False
    """Whether some groups of layers keep states (see `LayerState`)."""
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    policy: SchedulingPolicy = "turns"
    """Which request is admitted first and preempted last: the one whose turn is first, which without turns of a router
    is the one that arrived first (turns); the one that arrived first (fcfs); or the one with the smallest priority
    number (priority)."""
    priority_ageing_s: float = 60.0
    """Seconds of waiting that outweigh a priority difference of 1; 0: waiting counts for nothing, and requests of large
    priority numbers may starve."""
    preemption_mode: PreemptionMode = "recompute"
    """What happens to the KV of a preempted request: it is dropped and recomputed, copied to the host tier (swap), or
    whichever of the two costs less (auto)."""
    num_host_blocks: int = 0
    """Number of blocks in the host tier, its null block 0 included; 0: there is no host tier."""
    on_transfer_failure: TransferFailurePolicy = "reroute"
    """What happens to a request whose KV did not arrive: it ends with KV_LOST, so the router tries other nodes
    (reroute); it is computed here (recompute); or it ends with ERROR (fail)."""
    speculation: SpeculationConfig | None = None
    """How tokens are drafted; None: they are not."""
    max_loras: int = 8
    """The most different adapters of requests that run at a time."""
    long_sequences: LongSequences | None = None
    """Which sequences the model computes with other rotary angles; None: none."""
    num_encoder_rows: int = 0
    """The most rows of encoded inputs (images) that the runner keeps; 0: the model has no encoder."""
    max_times_passed: int = 16
    """How many later requests may be admitted before one that does not fit now."""
    max_stuck_requests: int = 8
    """How many requests that do not fit now a step may pass before it stops looking for one that fits."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.num_blocks < 2 or self.max_num_seqs < 1 or self.max_model_len < 2:
            raise ConfigError("block_size and max_num_seqs must be positive, num_blocks and max_model_len at least 2")
        if self.max_loras < 1:
            raise ConfigError(f"max_loras must be at least 1, not {self.max_loras}")
        if not self.windows or any(window is not None and window < 1 for window in self.windows):
            raise ConfigError(f"windows must be at least 1 key or None for each group, not {self.windows}")
        if not self.num_slots:
            raise ConfigError(
                f"num_blocks ({self.num_blocks}) must be more than the number of groups of layers ({len(self.windows)})"
            )
        if self.max_num_batched_tokens < 1:
            raise ConfigError(f"max_num_batched_tokens must be positive, not {self.max_num_batched_tokens}")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.effective_max_model_len:
            raise ConfigError(
                f"without chunked prefill max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_model_len ({self.effective_max_model_len})"
            )
        if self.num_encoder_rows < 0:
            raise ConfigError(f"num_encoder_rows can't be negative, as {self.num_encoder_rows} is")
        if self.num_host_blocks < 0 or self.num_host_blocks == 1:
            raise ConfigError(f"num_host_blocks must be 0 or at least 2, not {self.num_host_blocks}")
        if self.preemption_mode == "swap" and not self.num_host_blocks:
            raise ConfigError("preemption_mode swap needs a host tier: num_host_blocks of at least 2")
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark must be a share from 0 to below 1, not {self.watermark}")
        if not 0.0 <= self.priority_ageing_s < math.inf:
            raise ConfigError(f"priority_ageing_s must be 0 or a number of seconds, not {self.priority_ageing_s}")
        if self.long_prefill_token_threshold < 0 or self.max_times_passed < 0 or self.max_stuck_requests < 0:
            raise ConfigError("long_prefill_token_threshold, max_times_passed and max_stuck_requests can't be negative")

    @property
    def step_tokens(self) -> int:
        """The most tokens that a step computes: each request that decodes has one, whatever is left for prompts."""
        has_few = self.max_num_batched_tokens < self.max_num_seqs
        return self.max_num_batched_tokens + (self.max_num_seqs if has_few else 0)

    @property
    def effective_max_model_len(self) -> int:
        """max_model_len, or what the pool can hold if that is less. A request's last token needs no slot: its KV is
        never computed."""
        return min(self.max_model_len, max(self.num_slots, self._num_slots_of_one) + 1)

    @property
    def max_shared_len(self) -> int:
        """The same bound for one of several sequences. They share their prompt, so each of them holds blocks for all of
        its tokens until all sequences run, even where windows have passed."""
        return min(self.max_model_len, self.num_slots + 1)

    @property
    def _num_slots_of_one(self) -> int:
        """The most tokens of a lone request that is computed in chunks of one block, and reuses blocks that its windows
        have passed."""
        windows = [window for window in self.windows if window is not None]
        if not windows or not self.enable_chunked_prefill:
            return self.num_slots
        # The same bound as CacheGroups.num_held, for chunks of one block.
        in_windows = sum(-(-(window - 1) // self.block_size) + 3 for window in windows)
        left = self.num_blocks - 1 - in_windows
        num_whole = len(self.windows) - len(windows)
        if left < 0:
            return self.num_slots
        return left // num_whole * self.block_size if num_whole else self.max_model_len

    @property
    def num_slots(self) -> int:
        """The number of tokens that the pool can hold."""
        return (self.num_blocks - 1) // len(self.windows) * self.block_size

    @property
    def watermark_blocks(self) -> int:
        return int(self.watermark * (self.num_blocks - 1))
