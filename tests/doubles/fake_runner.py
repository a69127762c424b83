"""The fake of `ModelRunner`: it has no model, and any wrong KV changes its tokens.

Each slot of its cache holds 8 bytes: a digest of the slot before it (read through the block table, as attention would)
and of the token there. The token that is sampled is a function of the last slot, so that one lost, stale, overwritten
or foreign block anywhere in a request's history changes its tokens. `expected_tokens` is the oracle. The cache is real
memory, so that KV can be moved between processes as with any runner. Each group of layers has slots of its own, and all
slots in the group's window are checked. A group that keeps states has one slot in each block: that of the last token of
the stripe which was computed and is no draft. A request's adapter goes into each of its slots.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from baton.engine.batch import ForkedRequestData, ModelRunnerOutput, SchedulerOutput
from baton.engine.runner import (
    PROBE_BLOCKS,
    STATE_WINDOW,
    KVLayout,
    KVMemory,
    LayerGeometry,
    LayerGroup,
    LayerState,
    ModelInfo,
    OneProcessRunner,
)
from baton.engine.sequences.beams import BeamSearch
from baton.errors import AdapterRefused, InvalidRequest
from baton.messages.node_model import Capability
from baton.messages.pooling import NO_POOLING_FILES, PoolingParams
from baton.messages.sampling import SamplingParams, TokenLogprobs
from baton.messages.spans import EncoderContent, Span
from baton.model_formats.adapters import AdapterInfo, open_adapter
from baton.runner.blocks.host_blocks import HostBlocks
from baton.runner.execution.pooling import embedding_of_number

_MASK = (1 << 64) - 1
_START = 0x9E3779B97F4A7C15
_EMBEDDING_SIZE = 4
_GEOMETRY = LayerGeometry(1, 1, 1)


def _mix(before: int, token_id: int) -> int:
    value = (before ^ (token_id + 1) * 0xBF58476D1CE4E5B9) & _MASK
    value = (value ^ value >> 31) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 29


def _in_slots(token_id: int, adapter: str) -> int:
    """What a token adds to its slot: its own id, or with an adapter a number that depends on both."""
    return token_id + xxhash.xxh3_64_intdigest(adapter.encode()) if adapter else token_id


def _draw(slot: int, seed: int, vocab_size: int) -> int:
    return _mix(slot, seed) % vocab_size


def likeliest_tokens(slot: int, count: int, vocab_size: int) -> list[tuple[int, float]]:
    """The most likely tokens after a history whose last slot is `slot`, with their log-probabilities, best first.

    They are unrelated to the tokens that the runner samples.
    """
    found: dict[int, float] = {}
    logprob, number = 0.0, slot
    while len(found) < min(count, vocab_size):
        number = _mix(number, len(found))
        logprob -= 0.01 + number % 997 / 1000
        found.setdefault(number % vocab_size, logprob)
    return list(found.items())


def prompt_slots(token_ids: Sequence[int], group: int = 0, adapter: str = "") -> list[int]:
    """The slots of a correct cache after these tokens, for one group of layers, one number for each slot."""
    slots, before = [], _START
    for token_id in token_ids:
        before = _mix(before, _in_slots(token_id, adapter))
        slots.append(_of_group(before, group))
    return slots


def _of_group(slot: int, group: int) -> int:
    return slot ^ group * _START & _MASK


def expected_tokens(
    prompt_token_ids: Sequence[int], num_tokens: int, *, seed: int, vocab_size: int, adapter: str = ""
) -> list[int]:
    """The first `num_tokens` output tokens of a request, computed without any cache and regardless of stop tokens."""
    slot = prompt_slots(prompt_token_ids, adapter=adapter)[-1]
    tokens: list[int] = []
    for _ in range(num_tokens):
        tokens.append(_draw(slot, seed, vocab_size))
        slot = _mix(slot, _in_slots(tokens[-1], adapter))
    return tokens


def expected_embedding(prompt_token_ids: Sequence[int], adapter: str = "") -> bytes:
    """The embedding of a prompt, computed without any cache."""
    return embedding_of_number(prompt_slots(prompt_token_ids, adapter=adapter)[-1], _EMBEDDING_SIZE)


def expected_beams(
    prompt_token_ids: Sequence[int], search: BeamSearch, *, vocab_size: int, adapter: str = ""
) -> list[list[int]]:
    """The results of a beam search, best first, computed without any cache."""
    while not search.is_over:
        slots = [prompt_slots([*prompt_token_ids, *beam.token_ids], adapter=adapter)[-1] for beam in search.running]
        search.advance([likeliest_tokens(slot, search.num_candidates, vocab_size) for slot in slots])
    return [list(beam.token_ids) for beam in search.finished]


class ContradictoryStep(RuntimeError):
    """A step asks for what the runner can't have computed, or has no tokens or slots for."""


@dataclass(slots=True)
class _RequestState:
    """The runner's state of a request."""

    token_ids: list[int]
    block_ids: list[int]
    sampling_params: SamplingParams
    num_computed_tokens: int
    failure: str = ""
    """Why the request can't continue; empty while it can."""
    adapter: str = ""
    pooling: PoolingParams | None = None
    spans: Sequence[Span] = ()


def with_spans(token_ids: Sequence[int], spans: Sequence[Span]) -> list[int]:
    """Token ids as the fake computes them: at the positions of spans numbers that their contents decide."""
    replaced = list(token_ids)
    for span in spans:
        content = zlib.crc32(span.digest.encode())
        replaced[span.start : span.stop] = (content + span.first_row + place for place in range(span.length))
    return replaced


def rows_of(digest: str, num_rows: int) -> bytes:
    """The rows that a FakeRunner makes of an input."""
    return struct.pack("<I", zlib.crc32(digest.encode())) * num_rows


class FakeAdapters:
    """Adapters that are noted; their files are read only to check them."""

    def __init__(self) -> None:
        self.loaded: dict[str, Path] = {}
        """The directories of the loaded adapters, by digest."""
        self.refusals: dict[str, str] = {}
        """Adapters that can't be loaded, by digest, with the reason."""

    def check(self, directory: Path) -> AdapterInfo:
        """What an adapter's files say. Raises AdapterRefused for unsound ones, and for those in `refusals`."""
        info = open_adapter(directory).info()
        if info.digest in self.refusals:
            raise AdapterRefused(self.refusals[info.digest])
        return info

    def load(self, directory: Path, digest: str) -> None:
        """Take note of an adapter; its files aren't read. Raises AdapterRefused for those in `refusals`."""
        if digest in self.refusals:
            raise AdapterRefused(self.refusals[digest])
        self.loaded[digest] = directory

    def unload(self, digest: str) -> None:
        """Forget an adapter."""
        self.loaded.pop(digest, None)


class FakeEncoder:
    """Inputs that are noted; the rows of an input are its digest's."""

    def __init__(self) -> None:
        self.encoded: dict[str, int] = {}
        """Numbers of rows of the inputs that are kept, by digest."""
        self.num_encoded = 0
        """How many inputs were encoded."""
        self.unusable: dict[str, str] = {}
        """Inputs that can't be encoded, by digest, with the reason."""

    def encode(self, content: EncoderContent, num_rows: int) -> None:
        """Take note of an input. Raises InvalidRequest for those in `unusable`."""
        if content.digest in self.unusable:
            raise InvalidRequest("images", self.unusable[content.digest])
        self.encoded[content.digest] = num_rows
        self.num_encoded += 1

    def bytes_of(self, digest: str) -> memoryview | None:
        """The rows of an input, of one number each, which differs from input to input."""
        return None if digest not in self.encoded else memoryview(rows_of(digest, self.encoded[digest]))

    def keep(self, digest: str, num_rows: int, rows: bytes) -> None:
        """Take note of an input. Raises ValueError for rows that this runner would not make."""
        if rows != rows_of(digest, num_rows):
            raise ValueError(f"these are not {num_rows} rows of {digest}")
        self.encoded[digest] = num_rows

    def release(self, digests: Sequence[str] | None) -> None:
        """Forget inputs, which have no rows in memory."""
        for digest in [*self.encoded] if digests is None else digests:
            self.encoded.pop(digest, None)


class FakeRunner(OneProcessRunner):
    """Computes deterministic tokens on a cache of `num_blocks` blocks.

    Raises ContradictoryStep when the scheduler's output contradicts its own state of a request.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        vocab_size: int = 1000,
        max_model_len: int = 4096,
        num_host_blocks: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
        windows: Sequence[int | None] = (None,),
        keeps_states: bool = False,
        name: str = "scripted",
    ) -> None:
        """`windows`: the attention window of each group of layers, at least 2 keys; None: all keys. `keeps_states`:
        groups with STATE_WINDOW keep states."""
        groups = tuple(LayerGroup((layer,), window) for layer, window in enumerate(windows))
        self._state_groups = {i for i, window in enumerate(windows) if keeps_states and window == STATE_WINDOW}
        layers = [LayerState(1, 2 * block_size) if i in self._state_groups else _GEOMETRY for i in range(len(groups))]
        self.layout = KVLayout(block_size, tuple(layers), "float32", groups)
        self.model = ModelInfo(
            name=name,
            fingerprint=f"scripted-{vocab_size}",
            model_type="scripted",
            dtype="float32",
            numerics="scripted",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            bit_exact=True,
            embedding_size=_EMBEDDING_SIZE,
            capabilities=NO_POOLING_FILES.capabilities | {Capability.LORA},
        )
        self._slots = (ctypes.c_uint64 * ((num_blocks + PROBE_BLOCKS) * block_size))()
        self.memory = KVMemory(
            base_address=ctypes.addressof(self._slots),
            num_blocks=num_blocks,
            block_bytes=self.layout.block_bytes,
            kind="DRAM",
            device_id=0,
            owner=self._slots,
            num_probe_blocks=PROBE_BLOCKS,
        )
        cache = np.ctypeslib.as_array(self._slots).reshape(num_blocks + PROBE_BLOCKS, block_size)[:num_blocks]
        self._host = HostBlocks(cache, np.zeros((num_host_blocks, block_size), dtype=np.uint64))
        self._known: dict[str, _RequestState] = {}
        self.num_host_blocks = num_host_blocks
        self.adapters = FakeAdapters()
        self.encoder = FakeEncoder()
        self.ahead: dict[str, int] = {}
        """How many tokens the draft model has left to compute of requests whose KV is on its way."""
        self.failures: dict[str, str] = {}
        """Requests that fail in their next step, with the reason, which is reported in `failed`."""
        self.raise_next: Exception | None = None
        """Raised by the next step that computes anything."""
        self.raise_first: Exception | None = None
        """Raised by the next step, before it does anything."""
        self.seconds_per_copy = 0.0
        """The duration that steps report for each copy of a block."""
        self.seconds_per_step = 0.0
        """The duration that steps report beside that of their tokens."""
        self.seconds_per_token = 0.0
        """The duration that steps report for each token."""
        self.draft: Callable[[Sequence[int]], Sequence[int]] | None = None
        """The draft model: it drafts from the tokens that will be sampled next, as many as are wanted; None: none."""
        self.seconds_per_round = 0.0
        """The duration that steps report for a round of the draft model."""

    @property
    def num_requests(self) -> int:
        """Number of requests of which the runner has a state."""
        return len(self._known)

    def read_slots(self, block_ids: Sequence[int], num_tokens: int, group: int = 0) -> list[int]:
        """The first `num_tokens` slots of these blocks; 0 for a slot in the null block."""
        places = [self._slot(block_ids, position, group) for position in range(num_tokens)]
        return [self._slots[place] if place >= self.layout.block_size else 0 for place in places]

    def held_positions(self, num_tokens: int, group: int = 0) -> Sequence[int]:
        """The positions of the first `num_tokens` tokens that have a slot: all, or the last of each stripe."""
        if group not in self._state_groups:
            return range(num_tokens)
        return [
            min(end, num_tokens) - 1
            for end in range(self.layout.block_size, num_tokens + self.layout.block_size, self.layout.block_size)
        ]

    def write_slots(self, block_ids: Sequence[int], slots: Sequence[int], start: int = 0, group: int = 0) -> None:
        """Overwrite the slots from position `start` on, as a transfer would; those in the null block are skipped."""
        for position, value in enumerate(slots, start):
            place = self._slot(block_ids, position, group)
            if place >= self.layout.block_size:
                self._slots[place] = value

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step."""
        if self.raise_first is not None:
            error, self.raise_first = self.raise_first, None
            self._lose(scheduler_output)
            raise error
        num_copied = self._host.execute(scheduler_output)
        self._take_in(scheduler_output)
        if self.raise_next is not None and not scheduler_output.is_empty:
            error, self.raise_next = self.raise_next, None
            self._lose(scheduler_output)
            raise error
        size = self.layout.block_size
        for copy in scheduler_output.blocks_to_copy:
            for offset in range(size):
                self._slots[copy.destination * size + offset] = self._slots[copy.source * size + offset]
        sampled: dict[str, list[int]] = {}
        logprobs: dict[str, list[TokenLogprobs]] = {}
        failed: dict[str, str] = {}
        embeddings: dict[str, bytes] = {}
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            known = self._known[request_id]
            if known.failure:
                failed[request_id] = known.failure
                continue
            if missing := self._missing_image(known, num_tokens):
                # It may have ended while the step was in flight.
                failed[request_id] = known.failure = f"the rows of image {missing} are not here"
                continue
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(request_id, ())
            last_slot = self._compute(request_id, known, num_tokens - len(drafts))
            if request_id in self.failures:
                failed[request_id] = known.failure = self.failures.pop(request_id)
            elif known.num_computed_tokens < len(known.token_ids):
                continue
            elif known.pooling is not None:
                embeddings[request_id] = embedding_of_number(last_slot, _EMBEDDING_SIZE, known.pooling)
            else:
                slots = self._sample_and_verify(request_id, known, last_slot, drafts)
                sampled[request_id] = known.token_ids[len(known.token_ids) - len(slots) :]
                top = known.sampling_params.logprobs
                if top is not None:
                    likeliest = [likeliest_tokens(slot, max(top, 1), self.model.vocab_size) for slot in slots]
                    logprobs[request_id] = [TokenLogprobs(*best[0], 1, best[:top]) for best in likeliest]
        guesses = self._drafts(scheduler_output.num_drafts_wanted, sampled)
        self._compute_ahead(scheduler_output)
        return ModelRunnerOutput(
            sampled_token_ids=sampled,
            logprobs=logprobs,
            failed=failed,
            embeddings=embeddings,
            draft_token_ids=guesses,
            computes_ahead=any(self.ahead.values()),
            draft_seconds=self.seconds_per_round if guesses else 0.0,
            copy_seconds=self.seconds_per_copy * num_copied,
            compute_seconds=self.seconds_per_step
            + self.seconds_per_token * scheduler_output.total_num_scheduled_tokens,
        )

    def _missing_image(self, known: _RequestState, num_tokens: int) -> str:
        """The digest of an image whose rows the next tokens of a request need, and which are not here."""
        start, stop = known.num_computed_tokens, known.num_computed_tokens + num_tokens
        needed = (span.digest for span in known.spans if span.is_encoded and span.overlaps(start, stop))
        return next((digest for digest in needed if digest not in self.encoder.encoded), "")

    def _take_in(self, scheduler_output: SchedulerOutput) -> None:
        forks = {data.request_id: self._fork(data) for data in scheduler_output.scheduled_forked_reqs}
        for request_id in scheduler_output.finished_req_ids:
            self._known.pop(request_id, None)
        self._known.update(forks)
        for new in scheduler_output.scheduled_new_reqs:
            self._known[new.request_id] = _RequestState(
                [*with_spans(new.prompt_token_ids, new.spans), *new.output_token_ids],
                list(new.block_ids),
                new.sampling_params,
                new.num_computed_tokens,
                adapter=new.adapter,
                pooling=new.pooling,
                spans=new.spans,
            )
        for changed in scheduler_output.scheduled_cached_reqs:
            known = self._known[changed.request_id]
            if known.failure:
                continue
            if changed.resumed:
                known.block_ids = list(changed.new_block_ids)
                known.num_computed_tokens = changed.num_computed_tokens
            else:
                known.block_ids += changed.new_block_ids
            if known.num_computed_tokens != changed.num_computed_tokens:
                raise ContradictoryStep(f"{changed.request_id}: {changed} but {known.num_computed_tokens} are computed")
            if changed.last_token_id is not None:
                known.token_ids[-1] = changed.last_token_id

    def _fork(self, data: ForkedRequestData) -> _RequestState:
        parent = self._known[data.parent_id]
        if data.num_shared_tokens > parent.num_computed_tokens:
            raise ContradictoryStep(f"{data} but {parent.num_computed_tokens} are computed")
        return _RequestState(
            [*parent.token_ids[: data.num_shared_tokens], data.last_token_id],
            list(data.block_ids),
            parent.sampling_params,
            data.num_computed_tokens,
            adapter=parent.adapter,
            spans=parent.spans,
        )

    def _lose(self, scheduler_output: SchedulerOutput) -> None:
        """Let all requests of a step fail, in this step and in later ones that were scheduled before it failed."""
        for request_id in scheduler_output.num_scheduled_tokens:
            self._known[request_id] = _RequestState([], [], SamplingParams(), 0, "lost with an earlier step")

    def _compute(self, request_id: str, known: _RequestState, num_tokens: int, behind: int | None = None) -> int:
        """Compute the next tokens; returns the last one's slot. `behind`: they are drafts behind this slot, of which no
        state is kept."""
        if known.adapter and known.adapter not in self.adapters.loaded:
            raise ContradictoryStep(f"{request_id}: the adapter {known.adapter} is not loaded")
        start, stop = known.num_computed_tokens, known.num_computed_tokens + num_tokens
        num_groups = len(self.layout.groups)
        if stop > len(known.token_ids) or stop > len(known.block_ids) // num_groups * self.layout.block_size:
            raise ContradictoryStep(f"{request_id}: no token or no slot at position {stop - 1}")
        if behind is not None:
            before = behind
        else:
            before = self._slots[self._slot(known.block_ids, start - 1)] if start else _START
            if num_groups > 1 and not self._sees_its_history(known, start):
                before ^= _MASK
        for position in range(start, stop):
            before = _mix(before, _in_slots(known.token_ids[position], known.adapter))
            for group in range(num_groups):
                if behind is None or group not in self._state_groups:
                    self._slots[self._slot(known.block_ids, position, group)] = _of_group(before, group)
        known.num_computed_tokens = stop
        return before

    def _sample_and_verify(
        self, request_id: str, known: _RequestState, last_slot: int, drafts: Sequence[int]
    ) -> list[int]:
        """Append the next token, and further ones while the drafts are right; returns the slot before each of them."""
        slots, start = [], known.num_computed_tokens
        for draft in (*drafts, None):
            slots.append(last_slot)
            known.token_ids.append(_draw(last_slot, known.sampling_params.seed, self.model.vocab_size))
            if known.token_ids[-1] != draft:
                break
            last_slot = self._compute(request_id, known, 1, behind=last_slot)
        void = drafts[len(slots) - 1 :]
        if void:
            # Their KV is written all the same, so that a request that used it would get other tokens.
            kept, num_computed_tokens = known.token_ids.pop(), known.num_computed_tokens
            known.token_ids += void
            self._compute(request_id, known, len(void), behind=last_slot)
            del known.token_ids[-len(void) :]
            known.token_ids.append(kept)
            known.num_computed_tokens = num_computed_tokens
        if self._state_groups:
            # Its states are those behind the tokens that are no drafts, so the next step begins there.
            known.num_computed_tokens = start
        return slots

    def _drafts(self, wanted: Mapping[str, int], sampled: Collection[str]) -> dict[str, Sequence[int]]:
        """The draft model's drafts of the requests that sampled a token."""
        if self.draft is None:
            return {}
        return {
            request_id: self.draft(
                expected_tokens(
                    self._known[request_id].token_ids,
                    count,
                    seed=self._known[request_id].sampling_params.seed,
                    vocab_size=self.model.vocab_size,
                    adapter=self._known[request_id].adapter,
                )
            )
            for request_id, count in wanted.items()
            if request_id in sampled
        }

    def _compute_ahead(self, scheduler_output: SchedulerOutput) -> None:
        for request_id in (
            *scheduler_output.finished_req_ids,
            *(new.request_id for new in scheduler_output.scheduled_new_reqs),
        ):
            self.ahead.pop(request_id, None)
        if self.draft is None:
            return
        for loading in scheduler_output.loading_reqs:
            self.ahead[loading.request_id] = len(loading.prompt_token_ids)
        spare = scheduler_output.num_spare_tokens
        for request_id, left in self.ahead.items():
            self.ahead[request_id] -= min(left, spare)
            spare -= min(left, spare)

    def _sees_its_history(self, known: _RequestState, position: int) -> bool:
        """Whether all slots that a query at `position` sees, in all groups, are right."""
        for group, window in enumerate(self.layout.windows):
            first = max(0, position - window + 1) if window else 0
            if group in self._state_groups:
                first = max(0, position - 1)
            expected = prompt_slots(known.token_ids[:position], group, known.adapter)[first:]
            if self.read_slots(known.block_ids, position, group)[first:] != expected:
                return False
        return True

    def _slot(self, block_ids: Sequence[int], position: int, group: int = 0) -> int:
        block, offset = divmod(position, self.layout.block_size)
        offset = 0 if group in self._state_groups else offset
        return block_ids[block * len(self.layout.groups) + group] * self.layout.block_size + offset
