"""`baton.LLM` gives what a cluster gives to the same request, one prompt alone or many at once."""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

import baton
from baton import LLM, RequestOutput, SamplingParams
from baton.messages.sampling import TokenLogprobs
from baton.runner.loading import load_runner
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.support.caller import Answer
from tests.support.json_fit import PERSON
from tests.support.mini_cluster import MiniCluster, mini_cluster

DEMO_MODEL = Path(baton.__file__).parent / "demo_model"
LONG = "def fibonacci(n):\n" * 30
CASES: dict[str, tuple[str | list[int], SamplingParams]] = {
    "greedy": (LONG, SamplingParams(temperature=0.0, max_tokens=24)),
    "seeded": ("class Turtle:", SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=24)),
    "default length": ("import os", SamplingParams(seed=3)),
    "stop string": ("def f(x):", SamplingParams(temperature=0.0, max_tokens=60, stop="result", min_tokens=2)),
    "stop token": ("def f(x):", SamplingParams(temperature=0.0, max_tokens=60, stop_token_ids=[15, 418])),
    "schema": ("A person: ", SamplingParams(seed=5, max_tokens=150, json_schema=PERSON)),
    "several": ("def g(", SamplingParams(seed=6, n=2, max_tokens=24)),
    # The last ones stop before the first one.
    "several that stop": ("def g(", SamplingParams(seed=9, n=3, max_tokens=40, stop=["\n"])),
    "best of": ("def h(", SamplingParams(seed=8, n=1, best_of=3, max_tokens=16)),
    "beams": ("def i(", SamplingParams(beam_width=3, n=2, max_tokens=12)),
    "log-probabilities": ("x = ", SamplingParams(seed=9, logprobs=4, max_tokens=12)),
    "log-probabilities of a prompt": (LONG, SamplingParams(seed=12, prompt_logprobs=4, n=2, max_tokens=6)),
    "bad words": ("def f(x):", SamplingParams(temperature=0.0, max_tokens=24, bad_words=["return", "self"])),
    "token ids": ([5, 6, 7, 8], SamplingParams(seed=10, frequency_penalty=0.5, logit_bias={40: 3.0}, max_tokens=20)),
}
CHAT = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "Sort a list."}]


def make_llm() -> LLM:
    return LLM(DEMO_MODEL, dtype="float32", block_size=16, max_num_seqs=16, seed=1)


def make_runner(node_id: str) -> TorchModelRunner:
    return load_runner(TorchSpec(DEMO_MODEL, dtype="float32", block_size=16, num_blocks=512))


def post(cluster: MiniCluster, path: str, body: dict[str, Any]) -> Any:
    url = f"http://{cluster.router.http}/v1/{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def on_the_wire(position: TokenLogprobs) -> tuple[object, ...]:
    """The numbers as messages have them, in float32."""
    top = [(token, np.float32(logprob)) for token, logprob in position.top]
    return position.token_id, np.float32(position.logprob), position.rank, top


def check_equal(offline: RequestOutput, online: Answer) -> None:
    assert offline.seed == online.seed
    assert list(map(on_the_wire, offline.prompt_logprobs)) == list(map(on_the_wire, online.prompt_logprobs))
    for one in offline.outputs:
        other = online.sequence(one.index)
        assert (one.text, list(one.token_ids)) == (other.text, other.token_ids)
        assert [on_the_wire(position) for position in one.logprobs] == [on_the_wire(p) for p in other.logprobs]
        end = online.ends.get(one.index, online.end)
        assert (one.finish_reason, one.stop_reason) == (end.finish_reason, end.stop_reason)
    assert len(offline.outputs) == 1 + len(online.others)


async def test_requests_have_the_results_of_a_cluster() -> None:
    with make_llm() as llm:
        together = llm.generate([prompt for prompt, _ in CASES.values()], [params for _, params in CASES.values()])
        alone = [llm.generate(prompt, one)[0] for prompt, one in CASES.values()]
        chats = llm.chat([CHAT, CHAT[1:]], SamplingParams(seed=4, temperature=0.7, max_tokens=30))
        whole = llm.chat(CHAT[1:], SamplingParams(temperature=0.0, stop="\n\n"))
        embeddings = llm.embed(["def f(x):", LONG])
    async with mini_cluster(make_runner, DEMO_MODEL) as cluster:
        online = await asyncio.gather(*(cluster.generate(one.request(prompt)) for prompt, one in CASES.values()))
        body = {"messages": CHAT, "seed": 4, "temperature": 0.7, "max_tokens": 30}
        chatted = [
            await asyncio.to_thread(post, cluster, "chat/completions", body | {"messages": CHAT[n:]}) for n in (0, 1)
        ]
        body = {"messages": CHAT[1:], "temperature": 0.0, "stop": "\n\n"}
        chatted.append(await asyncio.to_thread(post, cluster, "chat/completions", body))
        body = {"input": ["def f(x):", LONG], "encoding_format": "base64"}
        vectors = (await asyncio.to_thread(post, cluster, "embeddings", body))["data"]
    for name, offline, other in zip(CASES, together, online, strict=True):
        if CASES[name][1].seed is not None:
            check_equal(offline, other)
        else:
            assert [one.text for one in offline.outputs] == [
                other.sequence(n).text for n in range(len(offline.outputs))
            ]
    assert [one.outputs for one in alone] == [one.outputs for one in together]
    reasons = {name: {one.finish_reason for one in result.outputs} for name, result in zip(CASES, alone, strict=True)}
    assert all(found == {"stop"} for name, found in reasons.items() if "stop" in name)
    assert {one.path.prefill_node for one in (other.end for other in online)} == {"prefill-0"}
    for offline, answer in zip([*chats, *whole], chatted, strict=True):
        choice = answer["choices"][0]
        assert offline.outputs[0].text == choice["message"]["content"]
        assert (offline.outputs[0].finish_reason, offline.outputs[0].stop_reason) == (
            choice["finish_reason"],
            choice["stop_reason"],
        )
        assert len(offline.prompt_token_ids) == answer["usage"]["prompt_tokens"]
    for one, item in zip(embeddings, vectors, strict=True):
        assert one.embedding.astype("<f4").tobytes() == base64.b64decode(item["embedding"])
        assert abs(float(np.linalg.norm(one.embedding)) - 1) < 1e-6


def test_drawn_seeds_are_those_of_the_seed_of_the_model() -> None:
    prompts, params = ["a", "b"], SamplingParams(max_tokens=8)
    with make_llm() as llm:
        first = llm.generate(prompts, params)
    with make_llm() as llm:
        assert [one.outputs for one in llm.generate(prompts, params)] == [one.outputs for one in first]
        again = llm.generate(prompts, params)
    assert {one.seed for one in first}.isdisjoint(one.seed for one in again)
    assert first[0].seed != first[1].seed
