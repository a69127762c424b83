"""`baton bench handoff`: measures the cost of a hand-off.

One request at a time runs on a real cluster of one prefill and one decode node, on a single engine, and on a second
cluster without digests; the same bytes are read in a bare NIXL loop. All nodes and the single engine compute with the
same number of threads, and what waits for its turn uses no processor time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median

from baton.bench.config import HandoffBenchConfig
from baton.bench.live_cluster import LiveCluster, live_cluster, model_flags
from baton.bench.micro.bare_reads import bare_sender, read_times
from baton.bench.micro.engine_drive import engine_core
from baton.client import GenerationClient
from baton.engine.request import Request
from baton.engine.runner import KVLayout
from baton.errors import BatonError, ConfigError
from baton.messages.generation import Accepted, Chunk, Finished, GenerateRequest
from baton.messages.kv_cache import block_sizes_fit
from baton.messages.node_report import TraceEvent
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.models.resolve import FoundModel
from baton.runner import TorchSpec, load

# Runs requests on a single engine in this process, as a baseline for a cluster.


@dataclass(frozen=True, slots=True)
class SoloRun:
    """The result of one request on one engine."""

    ttft_ms: float
    token_ids: Sequence[int]


class SoloEngine:
    """One engine with the same limits as a node's, without threads, network or router."""

    def __init__(
        self, model: FoundModel, dtype: str, cache_bytes: int, max_num_batched_tokens: int, num_threads: int
    ) -> None:
        self.runner = load(
            TorchSpec(
                model.directory,
                dtype,
                cache_bytes=cache_bytes,
                num_threads=num_threads,
                dequantize=model.dequantize,
            )
        )
        self._core = engine_core(self.runner, max_num_batched_tokens, min(64, max_num_batched_tokens))
        self._count = 0

    @property
    def layout(self) -> KVLayout:
        return self.runner.layout

    def run(self, prompt: Sequence[int], params: SamplingParams) -> SoloRun:
        """Runs one request to its end."""
        self._count += 1
        tokens: list[int] = []
        first_ms, started = 0.0, time.perf_counter()
        self._core.scheduler.add_request(Request(f"solo-{self._count}", RequestSpec(prompt, params)))
        while self._core.has_work():
            for outputs in self._core.step().values():
                for output in outputs:
                    tokens += output.new_token_ids
            if tokens and not first_ms:
                first_ms = (time.perf_counter() - started) * 1e3
        return SoloRun(first_ms, tokens)


_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class MixedReads:
    """Reads of the last chunk's length between nodes whose blocks have different sizes, as in `HandoffReport`."""

    sender_block_size: int
    reader_block_size: int
    bytes: int
    descriptors: int
    mover_bandwidth_gbps: float
    raw_bandwidth_gbps: float
    """Bandwidth of a bare loop over the same descriptors."""
    mover_share: float
    mover_share_min: float
    mover_share_max: float
    mover_digest_cost: float


@dataclass(frozen=True, slots=True)
class HandoffReport:
    """Medians over the requests. `ttft_ratio` is compared request by request, so that drift cancels out."""

    requests: int
    prompt_tokens: int
    chunks: int
    bytes: int
    raw_nixl_ms: float
    """Time of a bare read of the last chunk's blocks."""
    handover_ms: float
    """Time from the end of the last chunk to the request's first decode step."""
    transfer_ms: float
    """Time from the end of the last chunk until its blocks' arrival is confirmed. Both processes were idle before."""
    transfer_ms_p25: float
    transfer_without_digests_ms: float
    transfer_without_digests_ms_p25: float
    digest_cost: float
    """Time that digests add to a transfer, as a share of one without them; computed from medians, since single
    transfers differ by half."""
    digest_cost_p25: float
    """The same from first quartiles, which are less affected by a disturbed machine."""
    mover_digest_cost: float
    """Time that digests add to the reads of a busy mover, as a share."""
    decode_step_ms: float
    bandwidth_gbps: float
    """Bytes divided by the time of the reads on the mover's clock, gigabytes per second. Both processes were idle
    before."""
    mover_bandwidth_gbps: float
    """Bandwidth of reads of the last chunk's length through a mover that always has another read."""
    raw_bandwidth_gbps: float
    """Bandwidth of such reads in a bare loop."""
    mover_share: float
    """The mover's bandwidth as a share of the bare loop's, compared round by round."""
    ttft_cluster_ms: float
    ttft_cluster_ms_p10: float
    ttft_cluster_ms_p90: float
    ttft_single_ms: float
    ttft_single_ms_p10: float
    ttft_single_ms_p90: float
    ttft_ratio: float
    blocks_read_before_last_chunk: int
    blocks: int
    tokens_equal: bool
    """Whether cluster and single engine gave the same tokens for every prompt."""
    equal_reads_bytes: int
    """Bytes of a read of the last chunk's length between equal block sizes, with which those of `mixed_reads` compare.
    """
    mixed_reads: Sequence[MixedReads]


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """One request that was handed over, as its client saw it."""

    request_id: str
    ttft_ms: float
    step_ms: float
    """The median time between two tokens."""
    token_ids: Sequence[int]
    reading_ms: float
    """Time of its reads on the mover's clock."""
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class HandOverTimes:
    """One hand-over by the nodes' trace events."""

    handover_ms: float
    """Time from the end of the last chunk to the request's first decode step."""
    transfer_ms: float
    """Time from the end of the last chunk until its blocks' arrival is confirmed."""
    read_before_last_chunk: int
    """Blocks that were read before the last chunk was computed."""


def run(config: HandoffBenchConfig) -> HandoffReport:
    """Runs the benchmark.

    Raises ConfigError for a prompt that is too long or block sizes that don't fit, and any error of a request.
    """
    rng = Random(config.seed)
    solo = SoloEngine(config.model, config.dtype, config.kv_cache_bytes, config.max_num_batched_tokens, config.threads)
    if config.prompt_tokens + config.new_tokens > solo.runner.model.max_model_len:
        raise ConfigError(
            f"the model takes at most {solo.runner.model.max_model_len} tokens; use smaller --prompt-tokens or "
            "--new-tokens"
        )
    block_size, other_size = solo.layout.block_size, config.other_block_size
    if not block_sizes_fit(block_size, other_size):
        raise ConfigError(f"blocks of {block_size} and of {other_size} tokens: neither divides the other")
    vocab = solo.runner.model.vocab_size
    flags = [
        *model_flags(config.model, config.dtype),
        *("--threads", str(config.threads)),
        *("--kv-cache-memory", str(config.kv_cache_bytes)),
        *("--max-num-batched-tokens", str(config.max_num_batched_tokens)),
    ]
    cluster_runs, solo_runs, times, times_without_digests = [], [], [], []
    with live_cluster(*flags) as cluster, live_cluster(*flags, "--kv-digests", "off") as other:
        for index in range(config.requests + _WARM_UP):
            prompt = [rng.randrange(vocab) for _ in range(config.prompt_tokens)]
            # The order alternates, since the first cluster runs right after the single engine.
            order = (cluster, other) if index % 2 else (other, cluster)
            ran = {id(which): through_cluster(which, prompt, config.new_tokens) for which in order}
            alone = solo.run(prompt, _sampling(config))
            if index >= _WARM_UP:
                cluster_runs.append(ran[id(cluster)][0])
                solo_runs.append(alone)
                times.append(ran[id(cluster)][1])
                times_without_digests.append(ran[id(other)][1])
    return _report(config, solo, cluster_runs, solo_runs, times, times_without_digests)


def _sampling(config: HandoffBenchConfig) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=config.new_tokens, ignore_eos=True)


def through_cluster(cluster: LiveCluster, prompt: Sequence[int], new_tokens: int) -> tuple[ClusterRun, HandOverTimes]:
    """Runs one greedy request over both nodes of an idle cluster. Raises BatonError if it was not handed over."""
    with GenerationClient(cluster.grpc_address) as client:
        sample = _generate(client, prompt, new_tokens)
    return sample, _hand_over_times(cluster, sample.request_id, len(prompt))


def _generate(client: GenerationClient, prompt: Sequence[int], new_tokens: int) -> ClusterRun:
    request = GenerateRequest(prompt, temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    arrivals: list[float] = []
    tokens: list[int] = []
    request_id, finished = "", None
    started = time.perf_counter()
    for event in client.generate(request):
        if isinstance(event, Chunk):
            arrivals += [time.perf_counter()] * len(event.token_ids)
            tokens += event.token_ids
        elif isinstance(event, Finished):
            finished = event
        elif isinstance(event, Accepted):
            request_id = event.request_id
    if finished is None or not finished.path.prefill_node or finished.path.attempts != 1:
        raise BatonError(f"request {request_id} was not handed over: {finished}")
    steps = [after - before for before, after in itertools.pairwise(arrivals[1:])]
    return ClusterRun(
        request_id, (arrivals[0] - started) * 1e3, median(steps) * 1e3, tokens, finished.transfer_ms, finished.kv_bytes
    )


def _hand_over_times(cluster: LiveCluster, request_id: str, prompt_tokens: int) -> HandOverTimes:
    """The times from both nodes' trace events; both have the same clock, since they are on one machine."""
    events: dict[str, list[TraceEvent]] = {"prefill": [], "decode": []}
    for node in cluster.nodes():
        events[node.role] += [e for e in cluster.trace(node) if e.attempt.request_id == request_id]
    last_chunk = next(e for e in events["prefill"] if e.name == "chunk_computed" and e.value == prompt_tokens)
    arrived = next(e for e in events["decode"] if e.name == "kv_arrived")
    joined = [e.monotonic_ns for e in events["decode"] if e.name == "scheduled"][-1]
    read_before = [e.value for e in events["prefill"] if e.name == "read_progress" and e.seq < last_chunk.seq]
    return HandOverTimes(
        handover_ms=(joined - last_chunk.monotonic_ns) / 1e6,
        transfer_ms=(arrived.monotonic_ns - last_chunk.monotonic_ns) / 1e6,
        read_before_last_chunk=max(read_before, default=0),
    )


def _report(
    config: HandoffBenchConfig,
    solo: SoloEngine,
    cluster_runs: Sequence[ClusterRun],
    solo_runs: Sequence[SoloRun],
    times: Sequence[HandOverTimes],
    times_without_digests: Sequence[HandOverTimes],
) -> HandoffReport:
    block_size, block_bytes = solo.layout.block_size, solo.layout.block_bytes
    blocks = -(-config.prompt_tokens // block_size)
    chunk_ends = [*range(config.max_num_batched_tokens, config.prompt_tokens, config.max_num_batched_tokens)]
    bounds = [0, *(end // block_size for end in chunk_ends), blocks]
    pieces = [after - before for before, after in itertools.pairwise(bounds)]
    with bare_sender(block_bytes, blocks) as sender:
        reads = read_times(sender, pieces[-1])
    ttft = sorted(sample.ttft_ms for sample in cluster_runs)
    ttft_alone = sorted(sample.ttft_ms for sample in solo_runs)
    total_bytes = blocks * block_bytes
    transfer, plain = (sorted(t.transfer_ms for t in of) for of in (times, times_without_digests))
    return HandoffReport(
        requests=len(cluster_runs),
        prompt_tokens=config.prompt_tokens,
        chunks=len(pieces),
        bytes=total_bytes,
        raw_nixl_ms=reads.bare_ms,
        handover_ms=median(t.handover_ms for t in times),
        transfer_ms=median(transfer),
        transfer_ms_p25=_quantile(transfer, 0.25),
        transfer_without_digests_ms=median(plain),
        transfer_without_digests_ms_p25=_quantile(plain, 0.25),
        digest_cost=median(transfer) / median(plain) - 1,
        digest_cost_p25=_quantile(transfer, 0.25) / _quantile(plain, 0.25) - 1,
        mover_digest_cost=reads.digest_cost,
        decode_step_ms=median(sample.step_ms for sample in cluster_runs),
        bandwidth_gbps=total_bytes / median(sample.reading_ms for sample in cluster_runs) / 1e6,
        mover_bandwidth_gbps=pieces[-1] * block_bytes / reads.mover_ms / 1e6,
        raw_bandwidth_gbps=pieces[-1] * block_bytes / reads.bare_ms / 1e6,
        mover_share=reads.mover_share,
        ttft_cluster_ms=median(ttft),
        ttft_cluster_ms_p10=_quantile(ttft, 0.1),
        ttft_cluster_ms_p90=_quantile(ttft, 0.9),
        ttft_single_ms=median(ttft_alone),
        ttft_single_ms_p10=_quantile(ttft_alone, 0.1),
        ttft_single_ms_p90=_quantile(ttft_alone, 0.9),
        ttft_ratio=median(c.ttft_ms / s.ttft_ms for c, s in zip(cluster_runs, solo_runs, strict=True)),
        blocks_read_before_last_chunk=min(t.read_before_last_chunk for t in times),
        blocks=blocks,
        tokens_equal=all(c.token_ids == s.token_ids for c, s in zip(cluster_runs, solo_runs, strict=True)),
        equal_reads_bytes=reads.num_bytes,
        mixed_reads=mixed_reads(solo.layout, config.other_block_size, pieces[-1] * block_size),
    )


def mixed_reads(layout: KVLayout, other_block_size: int, num_tokens: int) -> Sequence[MixedReads]:
    """Measures reads of about so many tokens from blocks of the layout's size into such of another size, and back."""
    return [
        _mixed_reads(layout, other_block_size, num_tokens),
        _mixed_reads(replace(layout, block_size=other_block_size), layout.block_size, num_tokens),
    ]


def _mixed_reads(sender: KVLayout, reader_block_size: int, num_tokens: int) -> MixedReads:
    reader, num_blocks = replace(sender, block_size=reader_block_size), -(-num_tokens // sender.block_size)
    with bare_sender(sender.block_bytes, num_blocks, reader, sender.block_size) as process:
        times = read_times(process, num_blocks)
        return MixedReads(
            sender_block_size=sender.block_size,
            reader_block_size=reader_block_size,
            bytes=times.num_bytes,
            descriptors=num_blocks * process.plan.remote_parts * process.plan.max_pieces,
            mover_bandwidth_gbps=times.num_bytes / times.mover_ms / 1e6,
            raw_bandwidth_gbps=times.num_bytes / times.bare_ms / 1e6,
            mover_share=times.mover_share,
            mover_share_min=times.mover_share_min,
            mover_share_max=times.mover_share_max,
            mover_digest_cost=times.digest_cost,
        )


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
