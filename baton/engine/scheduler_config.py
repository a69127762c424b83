"""The scheduler's limits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from baton.errors import ConfigError

PreemptionMode = Literal["recompute", "swap", "auto"]
TransferFailurePolicy = Literal["reroute", "recompute", "fail"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one engine. Contradictions raise ConfigError."""

    num_blocks: int
    """Blocks in the cache, the null block 0 included."""
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    """Tokens computed in one step."""
    max_num_seqs: int = 128
    """Requests running at once; as many again may wait with their blocks for KV from elsewhere."""
    max_model_len: int = 4096
    """Prompt and output of one request together."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one request in one step; 0: no such limit."""
    watermark: float = 0.01
    """Share of the blocks that a newcomer must leave free while others run."""
    windows: tuple[int | None, ...] = (None,)
    """For each group of layers, keys that a query sees at most, itself included: blocks before them are let go of.
    None: all."""
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    """Who is tried first, and who gives way last: whoever came first, or whoever has the smallest priority."""
    priority_ageing_s: float = 60.0
    """Seconds of waiting that weigh as much as one step of priority; 0: none ever do, and a late one may starve."""
    preemption_mode: PreemptionMode = "recompute"
    """What becomes of a preempted request's KV: dropped, copied to the host tier, or whichever costs less."""
    num_host_blocks: int = 0
    """Blocks of the host tier, its null block 0 included; 0: there is none."""
    on_transfer_failure: TransferFailurePolicy = "reroute"
    """What becomes of a request whose KV did not arrive: it ends, and whoever sent it is told to try another prefill
    node; it is computed here, once; or it ends for good."""
    min_priority: int = -(2**31)
    """Requests below it are refused: so far ahead nobody may push."""
    max_times_passed: int = 16
    """How often smaller requests may be admitted past one that does not fit now."""
    max_stuck_requests: int = 8
    """How many that do not fit now are looked past in one step."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.num_blocks < 2 or self.max_num_seqs < 1 or self.max_model_len < 2:
            raise ConfigError("block_size and max_num_seqs must be positive, num_blocks and max_model_len at least 2")
        if not self.windows or any(window is not None and window < 1 for window in self.windows):
            raise ConfigError(f"windows must be at least 1 key or None for each group, not {self.windows}")
        if not self.num_slots:
            raise ConfigError(f"{self.num_blocks} blocks are not one for each of {len(self.windows)} groups of layers")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running request computes a token a step"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.effective_max_model_len:
            raise ConfigError(
                f"without chunked prefill max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_model_len ({self.effective_max_model_len})"
            )
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
    def effective_max_model_len(self) -> int:
        """max_model_len, or what the pool can hold: the KV of a request's last token is never computed."""
        return min(self.max_model_len, max(self.num_slots, self._num_slots_of_one) + 1)

    @property
    def max_shared_len(self) -> int:
        """The same bound for one of several sequences: they share what they begin with, so each holds all of its tokens
        until all of them run, whatever its windows still see."""
        return min(self.max_model_len, self.num_slots + 1)

    @property
    def _num_slots_of_one(self) -> int:
        """Tokens of one request alone, computed in the shortest chunks: of what its windows left it holds nothing."""
        windows = [window for window in self.windows if window is not None]
        if not windows or not self.enable_chunked_prefill:
            return self.num_slots
        # As CacheGroups.num_held has it, for chunks of a block.
        in_windows = sum(-(-(window - 1) // self.block_size) + 3 for window in windows)
        left = self.num_blocks - 1 - in_windows
        num_whole = len(self.windows) - len(windows)
        if left < 0:
            return self.num_slots
        return left // num_whole * self.block_size if num_whole else self.max_model_len

    @property
    def num_slots(self) -> int:
        """Tokens that the pool holds."""
        return (self.num_blocks - 1) // len(self.windows) * self.block_size

    @property
    def watermark_blocks(self) -> int:
        return int(self.watermark * (self.num_blocks - 1))
