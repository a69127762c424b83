"""The record that one router leaves of a flight for another: it is read back as written, or not at all."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.messages.generation import ModelCard
from baton.messages.ids import AttemptKey
from baton.messages.node_model import Capability
from baton.messages.sampling import SamplingParams
from baton.messages.spans import ContentKind, EncoderContent, source_spans
from router.admission.request import ValidRequest
from router.flight.flight_record import FlightJournal, FlightRecord, read_record
from router.placement.placement import Origin, Placement
from router.placement.reasons import IN_TURN
from tests.doubles.fake_flight_records import FakeFlightRecords, FakeFlightStore
from tests.support.router_parts import decode, prefill

CARD = ModelCard("m", 64, 300)
PARAMS = SamplingParams(
    temperature=0.3,
    seed=2**60 + 1,
    logit_bias={3: 1.5, 299: -0.1},
    logprobs=2,
    stop_token_ids=frozenset({7, 70, 270}),
    max_tokens=20,
    n=3,
)
REQUEST = ValidRequest(
    (),
    PARAMS,
    request_id="r",
    model="m",
    stop=("a\n", "é"),
    priority=-3,
    cache_salt="salt",
    num_returned=2,
    wants_logprobs=True,
    prompt_length=2,
    shown_tokens=(7,),
)
WITH_CONTEXT = replace(REQUEST, context_tokens=(7, 299))
ORIGIN = Origin("0123456789ab", "d.1")
RECORD = FlightRecord(REQUEST, 2**64 - 1, 2, "p.1", "d.1", 3, "r.1", 1e9, f"00-{'a' * 32}-{'b' * 16}-01", ORIGIN)


def paths(value: Any, at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(value, dict):
        return []
    found = []
    for key, inner in value.items():
        found += [(*at, key), *paths(inner, (*at, key))]
    return found


KEYS = [path for path in paths(json.loads(RECORD.to_json())) if "logit_bias" not in path[:-1]]


def test_a_record_names_the_input_of_an_encoder_with_its_kind() -> None:
    speech = EncoderContent.of(b"1234", ContentKind.SPEECH)
    request = replace(REQUEST, prompt_length=34, spans=source_spans(speech.digest, 10), contents=(speech,))
    record = replace(RECORD, request=request.without_prompt())
    found = read_record(record.to_json(), "r", replace(CARD, max_model_len=128))
    assert found == record
    assert found.request.needs == {Capability.TRANSCRIBE}


def test_a_record_without_a_context_is_that_of_routers_that_know_of_none() -> None:
    record = replace(RECORD, request=WITH_CONTEXT)
    assert read_record(record.to_json(), "r", CARD) == record
    found = json.loads(record.to_json())
    assert found["request"].pop("context_tokens") == [7, 299]
    assert read_record(json.dumps(found).encode(), "r", CARD) == RECORD
    assert json.loads(RECORD.to_json()) == found


@given(
    prompt_length=st.integers(1, 40),
    stop_token_ids=st.frozensets(st.integers(0, 299), max_size=20),
    temperature=st.floats(0, 2),
    stop=st.lists(st.text(min_size=1, max_size=8), max_size=3),
    flight=st.integers(0, 2**64 - 1),
)
def test_a_record_is_read_as_it_was_written(
    prompt_length: int, stop_token_ids: frozenset[int], temperature: float, stop: list[str], flight: int
) -> None:
    params = replace(PARAMS, stop_token_ids=stop_token_ids, temperature=temperature)
    request = replace(REQUEST, prompt_length=prompt_length, sampling_params=params, stop=tuple(stop))
    record = replace(RECORD, request=request, flight_id=flight)
    assert read_record(record.to_json(), "r", CARD) == record


@pytest.mark.parametrize("path", KEYS, ids=".".join)
@pytest.mark.parametrize("change", ["gone", "renamed", "of another type"])
def test_a_record_with_a_missing_or_changed_key_is_not_read(path: tuple[str, ...], change: str) -> None:
    found = json.loads(RECORD.to_json())
    owner = found
    for key in path[:-1]:
        owner = owner[key]
    value = owner.pop(path[-1])
    if change == "renamed":
        owner[path[-1] + "_"] = value
    elif change == "of another type":
        owner[path[-1]] = [{}]
    assert read_record(json.dumps(found).encode(), "r", CARD) is None


@pytest.mark.parametrize(
    "request_",
    [
        replace(REQUEST, request_id="other"),
        replace(REQUEST, model="other"),
        replace(REQUEST, prompt_token_ids=(1, 2)),
        replace(REQUEST, prompt_length=0),
        replace(REQUEST, prompt_length=-1),
        replace(REQUEST, prompt_length=45),
        replace(REQUEST, num_returned=4),
        replace(REQUEST, context_tokens=(1, 2, 3, 4, 5)),
        replace(REQUEST, context_tokens=(300,)),
        replace(REQUEST, context_tokens=(-1,)),
        replace(REQUEST, sampling_params=replace(PARAMS, max_tokens=0)),
    ],
)
def test_a_record_that_this_cluster_could_not_have_written_is_not_read(request_: ValidRequest) -> None:
    assert read_record(RECORD.to_json(), "r", CARD) is not None
    assert read_record(replace(RECORD, request=request_).to_json(), "r", CARD) is None


@settings(max_examples=300)
@given(data=st.binary(max_size=60), at=st.integers(0, 2000), keep=st.booleans())
def test_broken_bytes_are_not_read(data: bytes, at: int, keep: bool) -> None:
    good = RECORD.to_json()
    at = min(at, len(good) - 2)
    broken = good[:at] + data if keep else data
    assert read_record(broken, "r", CARD) is None


def test_a_record_is_as_small_for_a_prompt_of_131072_tokens_as_for_a_short_one() -> None:
    def size(num_tokens: int) -> int:
        prompt = tuple(range(100_000, 100_000 + num_tokens))
        store = FakeFlightStore()
        journal = FlightJournal(FakeFlightRecords(store, "c"), "r.1", lambda: 0.0)
        request = ValidRequest(prompt, SamplingParams(seed=1, max_tokens=100), request_id="r", model="m")
        journal.write(request, AttemptKey("r", 1, 2**63), Placement(prefill(), decode(), IN_TURN))
        return len(store.kept["c", "r"].record)

    assert size(131_072) - size(1) < 8
    assert size(131_072) < 1200
