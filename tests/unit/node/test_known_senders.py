"""A decode node meets every prefill node that it could read from, once, and no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.messages.ids import Peer
from baton.messages.kv_cache import KVFormat
from baton.registry import NodeRecord
from decode_node.senders import KnownSenders

FORMAT = KVFormat("m-1", "cpu-1", "float32", 16, 7)
P0 = NodeRecord(
    "p0",
    "prefill",
    "p0.x",
    "h:1",
    pid=1,
    version="0",
    started_at=0.0,
    lease_s=10.0,
    model="m",
    model_fingerprint="m-1",
    dtype="float32",
    numerics="cpu-1",
    vocab_size=1,
    max_model_len=1,
    block_size=16,
    num_blocks=1,
    link_protocol=7,
)
P1 = replace(P0, name="p1", incarnation="p1.x", address="h:2")


def test_each_incarnation_is_met_once() -> None:
    met: list[Peer] = []
    parted: list[str] = []
    senders = KnownSenders(FORMAT, met.append, parted.append)
    senders.update({"p0": P0})
    senders.update({"p0": P0, "p1": P1})
    assert met == [Peer("p0", "p0.x", "h:1"), Peer("p1", "p1.x", "h:2")]
    restarted = replace(P0, incarnation="p0.y")
    senders.update({"p0": restarted, "p1": P1})
    assert met[2:] == [Peer("p0", "p0.y", "h:1")]
    assert parted == ["p0.x"]
    # One that left and is back is new.
    senders.update({"p0": restarted})
    senders.update({"p0": restarted, "p1": P1})
    assert met[3:] == [Peer("p1", "p1.x", "h:2")]
    assert parted == ["p0.x", "p1.x"]


def test_nodes_that_can_hand_over_nothing_are_not_met() -> None:
    met: list[Peer] = []
    others = (
        replace(P0, role="decode"),
        replace(P0, model_fingerprint="m-2"),
        replace(P0, numerics="cuda-1"),
        replace(P0, dtype="bfloat16"),
        replace(P0, block_size=24),
        replace(P0, link_protocol=4),
        # An older version does not say which it speaks.
        replace(P0, link_protocol=0),
    )
    senders = KnownSenders(FORMAT, met.append, lambda incarnation: None)
    for other in others:
        senders.update({"p0": other})
    assert met == []


def test_a_node_that_pairs_across_numerics_meets_those_that_do_so_too() -> None:
    met: list[Peer] = []
    senders = KnownSenders(FORMAT._replace(kv_shape="s"), met.append, lambda incarnation: None)
    other = replace(P0, numerics="cuda-1")
    for kv_shape in ("", "t", "s"):
        senders.update({"p0": replace(other, kv_shape=kv_shape, incarnation=f"p0.{kv_shape}"), "p1": P1})
    assert [source.incarnation for source in met] == ["p1.x", "p0.s"]


def test_nodes_with_blocks_of_another_size_that_fits_are_met() -> None:
    met: list[Peer] = []
    senders = KnownSenders(FORMAT, met.append, lambda incarnation: None)
    senders.update({"p0": replace(P0, block_size=32), "p1": replace(P1, block_size=8)})
    assert [source.node_id for source in met] == ["p0", "p1"]


@pytest.mark.parametrize(("protocol", "fits"), [(0, False), (5, False), (6, True), (7, True)])
def test_sizes_of_blocks_may_differ_where_both_nodes_know_of_it(protocol: int, fits: bool) -> None:
    small = FORMAT._replace(link_protocol=protocol)
    large = small._replace(block_size=32)
    assert (small.fits(large), large.fits(small)) == (fits, fits)
    assert small.fits(small)
    assert small.misfits(large) == ([] if fits else ["block_size"])
    assert not small.fits(small._replace(block_size=24))
