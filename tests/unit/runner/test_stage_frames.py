"""Frames between stages: what arrives is what was sent, and whatever else arrives ends the connection with a reason."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import replace

import pytest

from baton.engine.batch import BlockCopy
from baton.messages.node_report import RankReport
from baton.runner.backends.cpu.kernels.errors import RankLost
from baton.runner.spec import CacheSpec
from baton.runner.stage_spec import PROTOCOL, StageSpec
from baton.runner.stages import frames
from baton.runner.stages.frames import FrameKind, FrameReader, FrameWriter, cut
from baton.runner.stages.stage_messages import StepCopies, figures_from_json, figures_to_json

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_frames_arrive_in_order_whatever_their_size(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_CHUNK_BYTES", 1000)
    writer, reader = FrameWriter(pair[0], "test", lambda why: None), FrameReader(pair[1])
    sent = [(FrameKind.ROWS, bytes(range(256)) * size) for size in (0, 1, 3, 4, 4000)]
    for kind, payload in sent:
        writer.send(kind, payload)
    assert [(frame.kind, bytes(frame.payload)) for frame in (reader.read() for _ in sent)] == sent
    writer.close()


def test_an_idle_writer_sends_heartbeats_which_no_reader_sees(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "INTERVAL_S", 0.01)
    reader = FrameReader(pair[1])
    pair[1].settimeout(10)
    writer = FrameWriter(pair[0], "test", lambda why: None)
    assert pair[1].recv(frames._HEADER.size, socket.MSG_WAITALL) == frames._HEADER.pack(FrameKind.HEARTBEAT, 0)
    writer.send(FrameKind.READY, b"now")
    assert bytes(reader.read().payload) == b"now"
    writer.close()


def test_a_silent_end_is_lost(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "INTERVAL_S", 0.001)
    reader = FrameReader(pair[1])
    reader.silence_allowed = 3
    pair[0].sendall(struct.pack("<B", FrameKind.ROWS))
    with pytest.raises(RankLost, match="sends no heartbeats"):
        reader.read()


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (struct.pack("<BQ", 200, 0), "unknown kind 200"),
        (struct.pack("<BQ", FrameKind.ROWS, 1 << 40), "a frame of 1099511627776 bytes; at most 17179869184"),
        (struct.pack("<BQ", FrameKind.ROWS, 1 << 30), "has closed its connection"),
        (b"", "has closed its connection"),
    ],
    ids=["unknown", "huge", "cut short", "closed"],
)
def test_what_is_no_frame_ends_the_connection(pair: Pair, sent: bytes, reason: str) -> None:
    pair[0].sendall(sent)
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(RankLost, match=reason):
        FrameReader(pair[1]).read()


def test_a_writer_whose_connection_fails_says_so_once(pair: Pair) -> None:
    lost: list[str] = []
    writer = FrameWriter(pair[0], "test", lost.append)
    cut(pair[0])
    for _ in range(3):
        writer.send(FrameKind.ROWS, b"rows")
    writer.close()
    assert len(lost) == 1
    assert "can't be sent anything" in lost[0]


def test_specifications_answers_and_copies_are_read_as_they_were_written() -> None:
    cache = CacheSpec(64, None, "int8", is_of_all_stages=True)
    spec = StageSpec("/models/tiny", "abc", "bfloat16", 16, cache, 5, 2, 4, 1, 3, 1 << 20, "int4", dequantize=True)
    assert StageSpec.from_json(spec.to_json()) == spec
    report = RankReport(5, 456, True, 1 << 30, 1 << 20, 7.5, 3)
    read = figures_from_json(figures_to_json([report, replace(report, pid=457)]), range(2, 4), "10.0.0.2")
    assert read == [replace(report, rank=2 + place, pid=456 + place, host="10.0.0.2") for place in range(2)]
    copies = StepCopies([BlockCopy(1, 2)], [BlockCopy(3, 4), BlockCopy(5, 6)], [BlockCopy(7, 8)])
    assert StepCopies.from_json(copies.to_json()) == copies
    assert not StepCopies()


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b'{"rank": 0, "pid": 1, "is_up": true}',
        b'[{"pid": 1}]',
        b'[{"rank": 0, "pid": Infinity, "is_up": true}]',
        b'[{"rank": 0, "pid": 99999999999999999999, "is_up": true}]',
        b'[{"rank": 0, "pid": 1, "is_up": true, "cpu_s": "much"}]',
        b'[{"rank": 0, "pid": 1, "is_up": true, "threads": 3}]',
    ],
)
def test_other_figures_are_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"it sent|its figures are|could not convert"):
        figures_from_json(text, range(1, 2), "")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[]", "no JSON object"),
        (b"{", "Expecting"),
        (b'{"protocol": 9}', f"the leader speaks version 9, and this one {PROTOCOL}"),
        (b'{"protocol": %d, "index": 1}' % PROTOCOL, "something else than what to load"),
    ],
)
def test_another_specification_is_refused(text: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        StageSpec.from_json(text)
