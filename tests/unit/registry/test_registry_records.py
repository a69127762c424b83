"""Records written by others, and which records stay valid after the registry lost its memory."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.registry.records import BadRecord, NodeRecord, OutageGrace, read_records

ROUTER = NodeRecord(
    name="router-0",
    role="router",
    incarnation="router-0.x",
    address="[::1]:50051",
    operator_address="127.0.0.1:50052",
    pid=1,
    version="0.1.0",
    started_at=3.5,
    lease_s=5.0,
)
NODE = replace(
    ROUTER,
    name="n",
    role="decode",
    incarnation="n.y",
    vocab_size=5,
    max_model_len=5,
    block_size=16,
    num_blocks=2,
    tp=2,
    pp=3,
    eos_token_ids=frozenset({4}),
)


@pytest.mark.parametrize("record", [ROUTER, NODE])
def test_a_record_is_read_as_it_was_written(record: NodeRecord) -> None:
    assert NodeRecord.from_json(record.to_json()) == record


def test_a_record_of_an_earlier_version_has_no_shape() -> None:
    stored = {key: value for key, value in json.loads(NODE.to_json()).items() if key not in ("tp", "pp")}
    assert NodeRecord.from_json(json.dumps(stored).encode()) == replace(NODE, tp=0, pp=0)


def test_keys_of_a_later_version_are_ignored() -> None:
    assert NodeRecord.from_json(json.dumps(json.loads(NODE.to_json()) | {"zones": [1]}).encode()) == NODE


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"role": "queen"}, "role"),
        ({"state": "asleep"}, "state"),
        ({"name": "a b"}, "name"),
        ({"name": ["n"]}, "name"),
        ({"address": "nowhere"}, "address"),
        ({"address": "h:99999"}, "address"),
        ({"operator_address": 5}, "operator_address"),
        ({"pid": True}, "pid"),
        ({"started_at": float("nan")}, "started_at"),
        ({"lease_s": -1}, "lease_s"),
        ({"block_size": 0}, "block_size"),
        ({"num_blocks": 2**60}, "num_blocks"),
        ({"tp": -1}, "tp"),
        ({"pp": "2"}, "pp"),
        ({"bit_exact": 1}, "bit_exact"),
        ({"model": None}, "model"),
        ({"eos_token_ids": [-1]}, "eos_token_ids"),
        ({"eos_token_ids": ["4"]}, "eos_token_ids"),
    ],
)
def test_an_invalid_value_is_named(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(BadRecord, match=complaint):
        NodeRecord.from_json(json.dumps(json.loads(NODE.to_json()) | change).encode())


def test_a_missing_key_is_named() -> None:
    found = json.loads(NODE.to_json())
    del found["incarnation"]
    with pytest.raises(BadRecord, match="no incarnation"):
        NodeRecord.from_json(json.dumps(found).encode())


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_raise_bad_record(data: bytes) -> None:
    assert set(read_records([("k", data)]).bad) == {"k"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(json.loads(NODE.to_json()))), json_values)
def test_any_value_of_a_field_is_read_or_refused(key: str, value: object) -> None:
    data = json.dumps(json.loads(NODE.to_json()) | {key: value}).encode()
    reading = read_records([("n.y", data)])
    assert len(reading.snapshot) + len(reading.bad) == 1


def test_a_record_missing_in_the_same_epoch_is_gone() -> None:
    grace = OutageGrace()
    assert set(grace.merge("e1", {"n": NODE}, 0.0)) == {"n"}
    assert set(grace.merge("e1", {}, 1.0)) == set()


@pytest.mark.parametrize("epochs", [["e2", "e2"], [None, "e2"], [None, None]])
def test_after_a_loss_of_the_registry_records_stay_valid_for_one_lease(epochs: list[str | None]) -> None:
    grace = OutageGrace()
    grace.merge("e1", {"n": NODE, "router-0": ROUTER}, 0.0)
    assert set(grace.merge(epochs[0], {}, 10.0)) == {"n", "router-0"}
    back = replace(NODE, incarnation="n.z")
    assert grace.merge(epochs[1], {"n": back}, 14.0) == {"n": back, "router-0": ROUTER}
    assert grace.merge(epochs[1], {"n": back}, 15.0) == {"n": back}
    assert grace.merge("e2", {}, 16.0) == {}
