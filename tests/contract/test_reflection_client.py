"""A gRPC client that learns everything but the address by reflection, as grpcurl does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from baton.config import bundled_model_dir
from baton.runner import SimulatedSpec
from baton.runner.simulated import SimulatedRunner
from baton.text.model_files import read_model_files
from tests.support.mini_cluster import MiniCluster, mini_cluster

SERVICE = "baton.v1.Generation"
PROMPT = "once upon a time"


class ReflectionClient:
    """A client that makes its messages from the server's descriptors."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        self._methods = {method.name: method for method in pool.FindServiceByName(SERVICE).methods}
        self.called: set[str] = set()

    @property
    def methods(self) -> set[str]:
        return set(self._methods)

    def call(self, name: str, **fields: Any) -> Any:
        """Call a method; return the answer, or all answers of a stream."""
        self.called.add(name)
        method = self._methods[name]
        answer = GetMessageClass(method.output_type)
        make = self._channel.unary_stream if method.server_streaming else self._channel.unary_unary
        invoke = make(f"/{SERVICE}/{name}", lambda message: message.SerializeToString(), answer.FromString)
        request = GetMessageClass(method.input_type)(**fields)
        return list(invoke(request, timeout=30)) if method.server_streaming else invoke(request, timeout=30)


@pytest.fixture
async def cluster() -> AsyncIterator[MiniCluster]:
    model_dir = bundled_model_dir()
    files = read_model_files(model_dir)
    spec = SimulatedSpec(num_blocks=64, vocab_size=files.vocab_size, max_model_len=256)
    async with mini_cluster(lambda name: SimulatedRunner(spec), Path(model_dir)) as running:
        yield running


@contextmanager
def refused(code: str) -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as caught:
        yield
    assert caught.value.code().name == code


def call_every_method(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        client = ReflectionClient(channel)
        (model,) = client.call("ListModels").models
        ids = list(client.call("Tokenize", model=model.name, text=PROMPT).token_ids)
        assert 0 < len(ids) <= len(PROMPT)
        assert client.call("Detokenize", token_ids=ids).text == PROMPT
        sampling = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
        by_text = client.call("Generate", request_id="mine", text=PROMPT, sampling_params=sampling)
        by_ids = client.call("Generate", token_ids={"ids": ids}, sampling_params=sampling)
        assert tokens_of(by_text) == tokens_of(by_ids)
        assert [event.WhichOneof("event") for event in (by_text[0], by_text[-1])] == ["accepted", "finished"]
        assert (by_text[0].request_id, by_text[0].accepted.prompt_tokens) == ("mine", len(ids))
        assert by_text[-1].finished.usage.completion_tokens == len(tokens_of(by_text)) == 6
        assert (text_of(by_text) + "x").startswith(client.call("Detokenize", token_ids=tokens_of(by_text)).text[:1])
        embedded = client.call("Embed", inputs=[{"text": PROMPT}, {"token_ids": {"ids": ids}}])
        assert embedded.prompt_tokens == 2 * len(ids)
        assert embedded.results[0].values == embedded.results[1].values
        with refused("NOT_FOUND"):
            client.call("Cancel", request_id="nobody")
        with refused("NOT_FOUND"):
            client.call("Resume", request_id="nobody")
        with refused("INVALID_ARGUMENT"):
            client.call("Generate", text=PROMPT, sampling_params={"top_p": 2.0})
        assert client.called == client.methods, "every method was tried"


def tokens_of(events: list[Any]) -> list[int]:
    return [token for event in events for token in event.chunk.token_ids]


def text_of(events: list[Any]) -> str:
    return "".join(event.chunk.text for event in events)


async def test_a_client_that_knows_only_reflection_calls_everything(cluster: MiniCluster) -> None:
    await asyncio.to_thread(call_every_method, cluster.router.grpc)


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
async def test_reflection_is_served_under_both_service_names(cluster: MiniCluster, version: str) -> None:
    name = f"grpc.reflection.{version}.ServerReflection"
    ask = cluster.channel.stream_stream(
        f"/{name}/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    questions = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=name),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="baton.v1.Nothing"),
    ]
    answers = [answer async for answer in ask(iter(questions))]
    listed = {service.name for service in answers[0].list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"} <= listed
    assert [answer.WhichOneof("message_response") for answer in answers[1:]] == [
        "file_descriptor_response",
        "file_descriptor_response",
        "error_response",
    ]


async def test_metadata_is_bounded(cluster: MiniCluster) -> None:
    ask = cluster.channel.unary_unary("/grpc.health.v1.Health/Check", None, None)
    await ask(b"", metadata=(("x-note", "y" * 7_000),))
    with refused("RESOURCE_EXHAUSTED"):
        await ask(b"", metadata=(("x-note", "y" * 8_500),))
