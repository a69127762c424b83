"""Names of adapters in the registry: one adapter a name, whoever gave it, and nothing that Baton has not written."""

from __future__ import annotations

import json

import pytest

from baton.messages.adapters import MAX_ADAPTERS, MAX_LISTED, AdapterSource
from baton.registry.desired import (
    DesiredChange,
    DesiredMemory,
    DesiredState,
    NamedAdapter,
    forget_adapter,
    name_adapter,
    named_adapters,
)

A, B = "a" * 64, "b" * 64


def source(name: str = "one", digest: str = A) -> AdapterSource:
    return AdapterSource(name, f"/{name}", digest)


def state_of(*adapters: AdapterSource) -> DesiredState:
    state = DesiredState()
    for adapter in adapters:
        state = name_adapter(adapter, state).applied_to(state)
    return state


def test_a_name_has_the_adapter_that_it_was_given_last() -> None:
    state = state_of(source(), source("two"), source(digest=B))
    assert {name: named.source.digest for name, named in state.named_adapters.items()} == {"one": B, "two": A}
    assert len(state.adapters) == 2
    gone = forget_adapter("one", state).applied_to(state)
    assert list(gone.named_adapters) == ["two"]
    assert forget_adapter("one", gone).is_empty


def test_of_two_adapters_that_got_a_name_at_once_all_routers_choose_the_same() -> None:
    before = state_of(source(digest="c" * 64))
    both = name_adapter(source(digest=B), before).applied_to(name_adapter(source(), before).applied_to(before))
    assert both.named_adapters["one"].source.digest == B
    later = name_adapter(source(), both).applied_to(both)
    assert (len(later.adapters), later.named_adapters["one"].source.digest) == (1, A)


GOOD = NamedAdapter(source()).text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{",
        "[" * 100_000,
        GOOD + " ",
        GOOD.replace('"number":1', '"number":0'),
        GOOD.replace('"number":1', '"number":true'),
        GOOD.replace('"number":1', '"number":1,"more":1'),
        GOOD.replace(A, "xyz"),
        GOOD.replace("/one", "one"),
        GOOD.replace('"one"', '"o ne"'),
        GOOD.replace('"one"', "7"),
        json.dumps({"name": "x" * 100_000}),
    ],
)
def test_what_baton_has_not_written_is_no_adapter(text: str) -> None:
    assert NamedAdapter.parse(text) is None
    assert DesiredState.of({"adapters": [text, GOOD]}).adapters == {GOOD}


def test_a_text_is_read_as_it_was_written() -> None:
    named = NamedAdapter(AdapterSource("org/name:1", "/dir with spaces/é", A), 7)
    assert NamedAdapter.parse(named.text) == named


def test_there_are_so_many_names_and_no_more() -> None:
    texts = [NamedAdapter(source(f"n{number:04}")).text for number in range(MAX_LISTED + 5)]
    assert len(named_adapters(reversed(texts))) == MAX_LISTED
    one_more = named_adapters(texts[: MAX_ADAPTERS + 1])
    assert len(one_more) == MAX_ADAPTERS + 1, "two routers have given the last name at the same time: none is dropped"


def test_a_registry_that_lost_its_data_gets_the_names_that_it_does_not_contradict() -> None:
    memory, known = DesiredMemory(), state_of(source(), source("two"))
    memory.merge("one", known)
    fresh = state_of(source(digest=B))
    believed, again = memory.merge("two", fresh)
    assert {name: named.source.digest for name, named in believed.named_adapters.items()} == {"one": B, "two": A}
    assert again == DesiredChange({"adapters": frozenset({NamedAdapter(source("two")).text})}, {})
