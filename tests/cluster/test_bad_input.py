"""Invalid requests are refused with the name of the field before anything is allocated anywhere."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from baton.errors import InvalidRequest
from baton.messages.generation import GenerateRequest
from baton.runner import SimulatedSpec
from baton.runner.simulated import SimulatedRunner
from baton.v1 import generation_pb2, generation_pb2_grpc
from tests.support.mini_cluster import MiniCluster, mini_cluster

pytestmark = pytest.mark.one_transport

VOCAB = 256
MODEL_LEN = 512
GOOD = GenerateRequest(prompt=[1, 2, 3], temperature=0.0, max_tokens=4)


@asynccontextmanager
async def cluster(tmp_path: Path) -> AsyncIterator[MiniCluster]:
    spec = SimulatedSpec(num_blocks=128, vocab_size=VOCAB, max_model_len=MODEL_LEN)
    async with mini_cluster(lambda name: SimulatedRunner(spec), tmp_path, token_ids_only=True) as running:
        yield running


BAD = [
    ("prompt", replace(GOOD, prompt=None)),
    ("prompt", replace(GOOD, prompt=[])),
    ("prompt", replace(GOOD, prompt=[1, VOCAB])),
    ("prompt", replace(GOOD, prompt=[1] * MODEL_LEN)),
    ("max_tokens", replace(GOOD, max_tokens=0)),
    ("max_tokens", replace(GOOD, max_tokens=MODEL_LEN)),
    ("temperature", replace(GOOD, temperature=math.nan)),
    ("temperature", replace(GOOD, temperature=math.inf)),
    ("temperature", replace(GOOD, temperature=-0.1)),
    ("temperature", replace(GOOD, temperature=2.1)),
    ("top_p", replace(GOOD, top_p=0.0)),
    ("top_p", replace(GOOD, top_p=math.nan)),
    ("top_k", replace(GOOD, top_k=-2)),
    ("top_k", replace(GOOD, top_k=VOCAB + 1)),
    ("min_p", replace(GOOD, min_p=1.5)),
    ("presence_penalty", replace(GOOD, presence_penalty=2.5)),
    ("frequency_penalty", replace(GOOD, frequency_penalty=-2.5)),
    ("repetition_penalty", replace(GOOD, repetition_penalty=0.0)),
    ("logit_bias", replace(GOOD, logit_bias={VOCAB: 1.0})),
    ("logit_bias", replace(GOOD, logit_bias={1: math.nan})),
    ("logit_bias", replace(GOOD, logit_bias=dict.fromkeys(range(301), 1.0))),
    ("allowed_token_ids", replace(GOOD, allowed_token_ids=(VOCAB,))),
    ("bad_words", replace(GOOD, bad_words=("x",) * 257)),
    ("logprobs", replace(GOOD, logprobs=21)),
    ("prompt_logprobs", replace(GOOD, prompt_logprobs=21)),
    ("min_tokens", replace(GOOD, min_tokens=5)),
    ("stop_token_ids", replace(GOOD, stop_token_ids=(VOCAB,))),
    ("request_id", replace(GOOD, request_id="a b")),
    ("request_id", replace(GOOD, request_id="x" * 65)),
    ("model", replace(GOOD, model="another")),
    ("stop", replace(GOOD, stop=("x",) * 17)),
    ("stop", replace(GOOD, stop=("x" * 257,))),
]


async def test_bad_fields_are_named_and_cost_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        for field, request in BAD:
            with pytest.raises(InvalidRequest) as caught:
                await running.generate(request)
            assert field in caught.value.field, f"{request}: {caught.value}"
        for node_id, node in running.nodes.items():
            assert not await running.trace(node_id), "a bad request reached a node"
            assert node.num_blocks_in_use == 0
        assert len((await running.generate(GOOD)).token_ids) == 4
        await running.wait_until_idle()


async def test_a_request_of_5_mib_is_refused_by_name(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        stub = generation_pb2_grpc.GenerationStub(running.channel)
        call = stub.Generate(generation_pb2.GenerateRequest(text="x" * (5 << 20)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "request" in (caught.value.details() or "")
        assert len((await running.generate(GOOD)).token_ids) == 4


async def test_health_and_reflection_answer(tmp_path: Path) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async with cluster(tmp_path) as running:
        health = health_pb2_grpc.HealthStub(running.channel)
        for service in ("", "baton.v1.Generation"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(running.channel)
        call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        listed = await call.read()
        names = {service.name for service in listed.list_services_response.service}
        assert {"baton.v1.Generation", "grpc.health.v1.Health"} <= names
