"""Attacks by gRPC calls that are meant to cost more than they may, with a client's key if keys are required."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Mapping

from baton.v1 import generation_pb2 as pb
from baton.wire.http2.header_blocks import write_headers
from tests.hostile.http2_client import WindowedClient, windowed
from tests.hostile.peers import Answers, Target, flood
from tests.support.http2_frames import request_fields

Attack = Callable[[Target, threading.Event], Answers]


def _calls(method: str, message: Callable[[], bytes], at_once: int, count: int = 2) -> Attack:
    """The same call again and again: `count` connections, and `at_once` of each at a time."""

    def attack(target: Target, over: threading.Event) -> Answers:
        fields = request_fields(f"/baton.v1.Generation/{method}")
        if target.key:
            fields.append(("authorization", f"Bearer {target.key}"))
        block, said = write_headers(fields), message()
        framed = b"\0" + struct.pack(">I", len(said)) + said

        def talk(client: WindowedClient, over: threading.Event, _: int) -> None:
            for first in range(1, 1 << 30, 2 * at_once):
                streams = range(first, first + 2 * at_once, 2)
                for stream in streams:
                    client.open(stream, block)
                    client.send(stream, framed, ends=True)
                for stream in streams:
                    client.wait_for_answer(stream)
                if over.is_set():
                    return

        return flood(target, over, "grpc", count, windowed(talk))

    return attack


def _ids(count: int) -> bytes:
    return pb.DetokenizeRequest(token_ids=[7] * count).SerializeToString()


def _text(num_bytes: int) -> bytes:
    return pb.TokenizeRequest(text="word " * (num_bytes // 5)).SerializeToString()


def _prompt(num_bytes: int) -> bytes:
    return pb.GenerateRequest(text="word " * (num_bytes // 5)).SerializeToString()


def _stops(count: int) -> bytes:
    return pb.GenerateRequest(text="a", sampling_params={"stop": ["x"] * count}).SerializeToString()


ATTACKS: Mapping[str, Attack] = {
    "gRPC ListModels as fast as it goes": _calls("ListModels", lambda: b"", 50, 12),
    "gRPC Detokenize of 1,000,000 ids": _calls("Detokenize", lambda: _ids(1_000_000), 4),
    "gRPC Detokenize of as many ids as the model reads": _calls("Detokenize", lambda: _ids(1_024), 4),
    "gRPC Tokenize of 1 MB": _calls("Tokenize", lambda: _text(1_000_000), 4),
    "gRPC Generate of 1 MB": _calls("Generate", lambda: _prompt(1_000_000), 4),
    "gRPC Generate with 300,000 stop strings": _calls("Generate", lambda: _stops(300_000), 4),
}
