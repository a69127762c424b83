"""How fast a call for 256 embeddings is, beside the model's own rate: both take turns, on one node with one thread.

    scripts/embedding_rates.py all-minilm-l6-v2 --dtype float32
    scripts/embedding_rates.py 0.5b --tokens 128

The node's rate is that of its engine in this process, with no router, no wire and no HTTP: prompts of a model that
generates are computed up to their first token, those of an encoder up to their vectors.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from baton.bench.micro.shapes import SHAPES, write_shape
from baton.clock import SystemClock
from baton.engine.core import EngineCore
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request
from baton.engine.runner import ModelRunner
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.messages.node import Leg
from baton.messages.pooling import PoolingParams
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.models.resolve import find_model
from baton.runner import TorchSpec, load

_CACHE_BYTES = 1 << 29
_BATON = Path(sys.executable).with_name("baton")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("model", help="as --model of baton up, or a shape: " + ", ".join(SHAPES))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--inputs", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an input")
    parser.add_argument("--pooling", default=None, help="last, cls or mean; default: the model's own")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--http-port", type=int, default=18321)
    args = parser.parse_args()
    with TemporaryDirectory(prefix="baton-rates-") as scratch:
        directory = Path(scratch) / "model"
        if args.model in SHAPES:
            write_shape(directory, args.model)
        else:
            directory = find_model(Path(args.model), os.environ).directory
        spec = TorchSpec(directory, dtype=args.dtype, cache_bytes=_CACHE_BYTES, num_threads=1)
        engine = make_engine(load(spec))
        up = [str(_BATON), "up", "--model", str(directory), "--dtype", args.dtype, "--prefill", "0", "--decode", "1"]
        flags = ["--run-dir", f"{scratch}/run", "--grpc-port", "0", "--http-port", str(args.http_port)]
        subprocess.run([*up, *flags, "--threads", "1", "--detach"], check=True, stdout=subprocess.DEVNULL)
        try:
            measure(engine, args)
        finally:
            subprocess.run([str(_BATON), "down", *flags[:2]], check=False, stdout=subprocess.DEVNULL)


def measure(engine: tuple[EngineCore, ModelRunner], args: argparse.Namespace) -> None:
    """Print both rates of each turn, and the median of their ratios with its range."""
    ratios = []
    for turn in range(args.turns + 1):
        rng = random.Random(turn)
        prompts = [[rng.randrange(5, 30_000) for _ in range(args.tokens)] for _ in range(args.inputs)]
        alone, called = engine_rate(*engine, prompts), call_rate(args.http_port, prompts, args.pooling)
        if turn:  # the first one warms both up
            ratios.append(called / alone)
            print(f"engine {alone:8.0f} tokens/s   call {called:8.0f} tokens/s   ratio {ratios[-1]:.3f}", flush=True)
    print(f"ratio: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


def make_engine(runner: ModelRunner) -> tuple[EngineCore, ModelRunner]:
    """An engine as a node's, without its thread."""
    is_encoder = runner.model.pooling.is_encoder
    config = SchedulerConfig(
        num_blocks=runner.memory.num_blocks,
        block_size=runner.layout.block_size,
        windows=runner.layout.windows,
        max_model_len=runner.model.max_model_len,
        enable_chunked_prefill=not is_encoder,
        enable_prefix_caching=not is_encoder,
    )
    key_fields = CacheKeyFields.of(runner.model, runner.layout)
    return EngineCore(Scheduler(config, key_fields, SystemClock()), runner), runner


def engine_rate(engine: EngineCore, runner: ModelRunner, prompts: Sequence[Sequence[int]]) -> float:
    """Tokens a second of the engine alone, which computes all prompts."""
    pooling = runner.model.pooling
    leg = Leg.EMBED if pooling.is_encoder else Leg.WHOLE
    params = PoolingParams(pooling.default) if pooling.is_encoder else None
    began = time.perf_counter()
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        spec = RequestSpec(prompt, sampling, pooling=params)
        engine.scheduler.add_request(Request(f"{began}-{number}", spec, leg=leg))
    while engine.has_work():
        engine.step()
    return sum(map(len, prompts)) / (time.perf_counter() - began)


def call_rate(port: int, prompts: Sequence[Sequence[int]], pooling: str | None) -> float:
    """Tokens a second of one call for the embeddings of all prompts."""
    body = json.dumps({"input": prompts, "encoding_format": "base64", "pooling": pooling})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    began = time.perf_counter()
    connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    content = json.loads(answer.read())
    seconds = time.perf_counter() - began
    connection.close()
    if answer.status != 200:
        raise SystemExit(f"the call failed: {content}")
    return float(content["usage"]["prompt_tokens"]) / seconds


if __name__ == "__main__":
    main()
