"""Which adapters a node acknowledges to which router."""

from __future__ import annotations

from baton.messages.adapters import MAX_LISTED, AdapterReport, AdapterSource, AdapterStatus
from baton.node.adapters.adapter_book import AdapterBook

A, B = "a" * 64, "b" * 64


def source(name: str = "one", digest: str = A, directory: str = "/one") -> AdapterSource:
    return AdapterSource(name, directory, digest)


def test_an_adapter_is_acknowledged_once_its_files_are_checked() -> None:
    book = AdapterBook()
    assert book.set_list(1, [source()]) == [source()]
    assert "not acknowledged" in book.why_not(A)
    assert book.report_for(1) == AdapterReport([])
    book.checked(source(), "")
    assert book.why_not(A) == ""
    assert book.directory_of(A) == "/one"
    assert book.report_for(1) == AdapterReport([AdapterStatus(A)])
    assert book.set_list(1, [source()]) == [], "what is known is not read again"


def test_each_router_is_told_of_its_own_adapters() -> None:
    book = AdapterBook()
    book.set_list(1, [source()])
    assert book.set_list(2, [source(), source("two", B, "/two")]) == [source("two", B, "/two")]
    book.checked(source(), "")
    book.checked(source("two", B, "/two"), "unsound")
    assert book.report_for(1) == AdapterReport([AdapterStatus(A)])
    assert book.report_for(2) == AdapterReport([AdapterStatus(A), AdapterStatus(B, "unsound")])
    assert (book.ports_with(A), book.ports_with(B)) == ([1, 2], [2])
    assert book.wanted == {A, B}
    book.forget_port(2)
    assert book.wanted == {A}
    assert book.why_not(B)


def test_a_refused_adapter_is_checked_again_when_it_is_named_in_another_directory_or_was_inspected() -> None:
    book = AdapterBook()
    book.set_list(1, [source()])
    book.checked(source(), "changed")
    assert book.set_list(1, [source()]) == []
    elsewhere = source(directory="/copy")
    assert book.set_list(1, [elsewhere]) == [elsewhere]
    book.checked(source(), "")  # late news of the directory before
    assert book.why_not(A)
    book.checked(elsewhere, "changed, too")
    assert book.found_again(A, "/one") == ()
    assert book.found_again(A, "/copy") == [1]
    assert book.why_not(A) == ""
    assert book.found_again(A, "/copy") == ()


def test_an_acknowledged_adapter_may_be_refused_later() -> None:
    book = AdapterBook()
    book.refuse(A, "unknown ones stay so")
    book.set_list(1, [source()])
    book.checked(source(), "")
    book.refuse(A, "gone")
    assert book.report_for(1) == AdapterReport([AdapterStatus(A, "gone")])


def test_unsound_and_too_many_entries_are_left_out() -> None:
    book = AdapterBook()
    unsound = [source("bad name"), source(digest="12"), source(directory="relative"), source(directory="/x\n")]
    many = [source(f"n{number}", f"{number:064x}") for number in range(MAX_LISTED + 5)]
    assert book.set_list(1, [*unsound, *many]) == many[:MAX_LISTED]


def test_operators_see_names_states_and_reasons() -> None:
    book = AdapterBook()
    book.set_list(1, [source(), source("two", B, "/two"), source("three", "c" * 64, "/three")])
    book.set_list(2, [source("also-one")])
    book.checked(source(), "")
    book.checked(source("two", B, "/two"), "unsound")
    rows = [(row.name, row.state, row.refusal) for row in book.rows(frozenset())]
    assert rows == [
        ("also-one", "acknowledged", ""),
        ("one", "acknowledged", ""),
        ("three", "checking", ""),
        ("two", "refused", "unsound"),
    ]
    assert {row.name for row in book.rows({A}) if row.state == "loaded"} == {"one", "also-one"}
