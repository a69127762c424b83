"""A runner without a model: its tokens and its KV bytes are hashes of the request's history.

The KV bytes of a token are a function of its token id, its position, the request's adapter and the KV bytes of the
token before it *as they are in the cache*; the next token is a function of all KV bytes of the request's history. So a
block with another request's KV, a block missed by a transfer or a stale table gives other tokens than the same history
without a cache. Needs only numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from baton.engine.batch import ModelRunnerOutput, SchedulerOutput
from baton.engine.runner import PROBE_BLOCKS, KVLayout, KVMemory, LayerGeometry, ModelInfo, OneProcessRunner
from baton.messages.node_model import Capability
from baton.messages.pooling import NO_POOLING_FILES, Pooling, PoolingParams
from baton.messages.sampling import SamplingParams, TokenLogprobs
from baton.messages.spans import EncoderContent
from baton.model_formats.adapters import AdapterInfo, open_adapter
from baton.runner.blocks.host_blocks import HostBlocks
from baton.runner.execution.encoded_rows import EncodedRows
from baton.runner.execution.philox import uniform
from baton.runner.execution.pooling import embedding_of_number
from baton.runner.execution.prompt_logprobs import PromptChunk, chunks_of
from baton.runner.execution.request_table import RequestState, RequestTable, Scheduled
from baton.runner.spec import SimulatedSpec

Bytes = npt.NDArray[np.uint8]

ROOT = b"baton simulated root"
"""What stands before the KV bytes of a request's first token."""
_EMBEDDING_SIZE = 8


def token_bytes(layout: KVLayout) -> int:
    """KV bytes of one token over all layers."""
    return layout.block_bytes // layout.block_size


def embedding_of(kv: Bytes, params: PoolingParams) -> bytes:
    """The vector of a prompt with the KV bytes kv [tokens, ...]: float32, little-endian."""
    return embedding_of_number(_digest(kv) ^ list(Pooling).index(params.kind), _EMBEDDING_SIZE, params)


def likeliest_tokens(kv: Bytes, count: int, vocab_size: int) -> list[tuple[int, float]]:
    """The runner's log-probabilities after the history kv [tokens, ...]: (token id, log-probability), best first.

    The first one is the token that greedy sampling without constraints returns; the others are arbitrary.
    """
    likeliest: dict[int, float] = {}
    logprob, number = 0.0, _digest(kv)
    while len(likeliest) < min(count, vocab_size):
        logprob -= 0.01 + number % 997 / 1000
        likeliest.setdefault(number % vocab_size, logprob)
        number = xxhash.xxh3_64_intdigest(number.to_bytes(8, "little"), seed=len(likeliest))
    return list(likeliest.items())


def prompt_logprob(kv: Bytes, token_id: int, top: int, spec: SimulatedSpec) -> TokenLogprobs:
    """The log-probability of a prompt's token behind the history kv. Those not among the likeliest have equal ones."""
    likeliest = likeliest_tokens(kv, max(top, 1), spec.vocab_size)
    rank = next((rank for rank, entry in enumerate(likeliest) if entry[0] == token_id), None)
    logprob = likeliest[-1][1] - 1.0 if rank is None else likeliest[rank][1]
    return TokenLogprobs(token_id, logprob, 1 + (len(likeliest) if rank is None else rank), likeliest[:top])


def layout_of(spec: SimulatedSpec) -> KVLayout:
    """The block layout of a simulated model."""
    return KVLayout.uniform(spec.block_size, spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.dtype)


def head_rows(layout: KVLayout) -> tuple[int, int, int, int]:
    """The shape of one token's KV: layers, keys and values, KV heads, bytes of a head."""
    first = layout.layers[0]
    assert isinstance(first, LayerGeometry)
    num_kv_heads = first.num_kv_heads
    return layout.num_layers, 2, num_kv_heads, token_bytes(layout) // (layout.num_layers * 2 * num_kv_heads)


def slot_of(before: bytes, token_id: int, position: int, rows: tuple[int, int, int, int], adapter: str = "") -> Bytes:
    """One token's KV: a 64-bit hash, expanded to the token's size so that no two heads have equal bytes."""
    chain = xxhash.xxh3_64_intdigest(
        before + token_id.to_bytes(8, "little", signed=True) + position.to_bytes(8, "little") + adapter.encode()
    )
    size = int(np.prod(rows))
    words = np.arange(1, -(-size // 8) + 1, dtype=np.uint64)
    # Weyl sequence and multiply-xorshift (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators").
    words = words * np.uint64(0x9E3779B97F4A7C15) + np.uint64(chain)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    return words.view(np.uint8)[:size].reshape(rows)


def _digest(kv: Bytes) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(kv).data)


def next_token(kv: Bytes, params: SamplingParams, index: int, spec: SimulatedSpec) -> int:
    """Output token `index` after the history kv [tokens, ...]. The seed matters unless sampling is greedy."""
    digest = _digest(kv)
    if not params.is_greedy:
        digest ^= int(uniform(params.seed, index) * 2**53) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    token_id = digest % spec.vocab_size
    stops = params.stops(spec.eos_token_ids)
    while index < params.min_tokens and token_id in stops and len(stops) < spec.vocab_size:
        token_id = (token_id + 1) % spec.vocab_size
    return token_id


class _AnyAdapters:
    """Adapters of which every one fits; only their files are looked at."""

    def __init__(self, max_rank: int) -> None:
        self._max_rank = max_rank
        self.loaded: set[str] = set()
        """Their digests."""
        self.unload = self.loaded.discard

    def check(self, directory: Path) -> AdapterInfo:
        return open_adapter(directory, self._max_rank).info()

    def load(self, directory: Path, digest: str) -> None:
        open_adapter(directory, self._max_rank).check_digest(digest)
        self.loaded.add(digest)


class _EmptyRows:
    """Rows of inputs, without numbers: there is no encoder, and what counts of an input is its digest."""

    def rows(self, content: EncoderContent, num_rows: int) -> npt.NDArray[np.float32]:
        return np.zeros((num_rows, 0), dtype=np.float32)


class SimulatedRunner(OneProcessRunner):
    """A `ModelRunner` for tests and for clusters larger than the machine. Called from one thread."""

    root = ROOT
    """What stands before the KV bytes of a first token here: with another one all KV has other bits."""

    def __init__(self, spec: SimulatedSpec) -> None:
        self._spec = spec
        self.layout = layout_of(spec)
        layers, two, heads, row = head_rows(self.layout)
        shape = (spec.num_blocks + PROBE_BLOCKS, layers, two, heads, spec.block_size, row)
        memory: Bytes = np.zeros(shape, dtype=np.uint8)
        self._cache = memory[: spec.num_blocks]
        host = np.empty((spec.num_host_blocks, *self._cache.shape[1:]), dtype=np.uint8)
        self._host = HostBlocks(self._cache, host)
        self.num_host_blocks = spec.num_host_blocks
        self.memory = KVMemory(
            base_address=self._cache.ctypes.data,
            num_blocks=spec.num_blocks,
            block_bytes=self.layout.block_bytes,
            kind="DRAM",
            device_id=0,
            owner=memory,
            num_probe_blocks=PROBE_BLOCKS,
            layout=self.layout,
        )
        fields = f"{spec.vocab_size}/{spec.max_model_len}/{sorted(spec.eos_token_ids)}/{spec.name}"
        self.model = ModelInfo(
            name=spec.name,
            fingerprint=xxhash.xxh3_128_hexdigest(fields.encode()),
            model_type="simulated",
            dtype=spec.dtype,
            numerics="simulated-1",
            vocab_size=spec.vocab_size,
            max_model_len=spec.max_model_len,
            eos_token_ids=spec.eos_token_ids,
            bit_exact=True,
            embedding_size=_EMBEDDING_SIZE,
            capabilities=NO_POOLING_FILES.capabilities | {Capability.LORA},
        )
        self.adapters = _AnyAdapters(spec.max_lora_rank)
        self.encoder = EncodedRows(_EmptyRows())
        self._requests = RequestTable(
            self.layout,
            spec.num_blocks,
            spec.vocab_size,
            spec.max_model_len,
            self.adapters.loaded,
            encoded=self.encoder,
        )

    @property
    def num_requests(self) -> int:
        """Requests that the runner has not forgotten."""
        return len(self._requests)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step. A failure of one request is reported in `failed`, never raised."""
        num_copied = self._host.execute(scheduler_output)
        self._requests.update(scheduler_output)
        scheduled, failed = self._requests.begin(
            scheduler_output.num_scheduled_tokens.items(), scheduler_output.scheduled_spec_decode_tokens
        )
        for copy in scheduler_output.blocks_to_copy:
            self._cache[copy.destination] = self._cache[copy.source]
        copy_seconds, compute_seconds = self._seconds(scheduled, num_copied)
        if self._spec.sleep is not None and (scheduled or num_copied):
            self._spec.sleep(copy_seconds + compute_seconds)
        tokens: dict[str, list[int]] = {}
        logprobs: dict[str, list[TokenLogprobs]] = {}
        embeddings: dict[str, bytes] = {}
        prompt_logprobs: dict[str, Sequence[TokenLogprobs]] = {}
        chunks = {chunk.state.request_id: chunk for chunk in chunks_of(scheduled)}
        for share in scheduled:
            self._store(share)
            if (chunk := chunks.get(share.state.request_id)) is not None:
                chunk.keep(self._prompt_logprobs(chunk))
                if chunk.is_last:
                    prompt_logprobs[share.state.request_id] = tuple(share.state.prompt_logprobs)
            if not share.samples:
                continue
            state = share.state
            kv = self.read(state.block_table, share.stop)
            if state.pooler is not None:
                embeddings[state.request_id] = embedding_of(kv, state.pooler.params)
                continue
            sampled = self._sample_and_verify(state, kv, share.drafts)
            tokens[state.request_id] = [token.token_id for token in sampled]
            if state.sampling_params.logprobs is not None:
                logprobs[state.request_id] = sampled
        self._requests.commit(scheduled, tokens)
        return ModelRunnerOutput(
            tokens,
            logprobs,
            failed,
            embeddings=embeddings,
            prompt_logprobs=prompt_logprobs,
            copy_seconds=copy_seconds,
            compute_seconds=compute_seconds,
        )

    def read(self, block_ids: Sequence[int] | npt.NDArray[np.int32], num_tokens: int) -> Bytes:
        """KV of the first `num_tokens` tokens in these blocks, shaped like `expected_kv`'s."""
        blocks = self._cache[np.asarray(block_ids, dtype=np.int64)[: -(-num_tokens // self._spec.block_size)]]
        by_token = blocks.transpose(0, 4, 1, 2, 3, 5)
        return by_token.reshape(-1, *by_token.shape[2:])[:num_tokens]

    def _store(self, share: Scheduled) -> None:
        state, start = share.state, share.start
        rows, token_ids = head_rows(self.layout), state.rows(start, share.stop)
        before = self._slot_at(state, start - 1).tobytes() if start else self.root
        for position in range(start, share.stop):
            slot = slot_of(before, int(token_ids[position - start]), position, rows, state.adapter)
            self._slot_at(state, position)[...] = slot
            before = slot.tobytes()

    def _sample_and_verify(self, state: RequestState, kv: Bytes, drafts: Sequence[int]) -> list[TokenLogprobs]:
        """Append the next token, and further ones while the drafts are right. `kv`: of all tokens and drafts."""
        sampled = []
        top = state.sampling_params.logprobs
        for draft in (*drafts, None):
            history = kv[: state.num_tokens]
            token_id = next_token(history, state.sampling_params, state.num_output_tokens, self._spec)
            likeliest = likeliest_tokens(history, max(top, 1), self._spec.vocab_size) if top is not None else []
            sampled.append(TokenLogprobs(token_id, likeliest[0][1] if likeliest else 0.0, 1, likeliest[:top]))
            state.append_token(token_id)
            if token_id != draft:
                break
        return sampled

    def _prompt_logprobs(self, chunk: PromptChunk) -> list[TokenLogprobs]:
        """The log-probabilities of the tokens behind the rows of a stored chunk."""
        state, start, top = chunk.state, chunk.start, chunk.state.sampling_params.prompt_logprobs or 0
        return [
            prompt_logprob(self.read(state.block_table, stop), int(state.token_ids[stop]), top, self._spec)
            for stop in range(start + 1, start + 1 + chunk.count)
        ]

    def _slot_at(self, state: RequestState, position: int) -> Bytes:
        block, offset = divmod(position, self._spec.block_size)
        view: Bytes = self._cache[int(state.block_table[block]), :, :, :, offset]
        return view

    def _seconds(self, scheduled: Sequence[Scheduled], num_copied: int) -> tuple[float, float]:
        """The simulated seconds of a step: of its copies from and to the host tier, and of everything else."""
        time = self._spec.step_time
        if not scheduled:
            return num_copied * time.per_copied_block, 0.0
        decoding = sum(share.count for share in scheduled if share.count == share.num_sampled_rows)
        prefilling = sum(share.count for share in scheduled) - decoding
        computing = time.per_step + prefilling * time.per_prefill_token + decoding * time.per_decode_seq
        return num_copied * time.per_copied_block, computing
