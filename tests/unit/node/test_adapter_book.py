"""Which adapters a node acknowledges to which router."""

from __future__ import annotations

from collections.abc import Sequence

from baton.messages.adapters import MAX_LISTED, AdapterReport, AdapterSource, AdapterStatus
from baton.node.adapters.node_adapters import AdapterBook

A, B = "a" * 64, "b" * 64


def source(name: str = "one", digest: str = A, directory: str = "/one") -> AdapterSource:
    return AdapterSource(name, directory, digest)


def set_list(book: AdapterBook, port: int, adapters: Sequence[AdapterSource]) -> list[AdapterSource]:
    """Give a router's list; returns what is to be checked now."""
    book.set_list(port, adapters)
    checks = []
    while (source := book.next_check()) is not None:
        checks.append(source)
    return checks


def test_an_adapter_is_acknowledged_once_its_files_are_checked() -> None:
    book = AdapterBook()
    assert set_list(book, 1, [source()]) == [source()]
    assert "not acknowledged" in book.why_not(A)
    assert book.report_for(1) == AdapterReport([])
    book.checked(source(), "")
    assert book.why_not(A) == ""
    assert book.directory_of(A) == "/one"
    assert book.report_for(1) == AdapterReport([AdapterStatus(A)])
    assert set_list(book, 1, [source()]) == [], "what is known is not read again"


def test_each_router_is_told_of_its_own_adapters() -> None:
    book = AdapterBook()
    set_list(book, 1, [source()])
    assert set_list(book, 2, [source(), source("two", B, "/two")]) == [source("two", B, "/two")]
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
    set_list(book, 1, [source()])
    book.checked(source(), "changed")
    assert set_list(book, 1, [source()]) == []
    elsewhere = source(directory="/copy")
    assert set_list(book, 1, [elsewhere]) == [elsewhere]
    book.checked(source(), "")  # late news of the directory before
    assert book.why_not(A)
    book.checked(elsewhere, "changed, too")
    assert book.found_again(A, "/one") == ()
    assert book.found_again(A, "/copy") == [1]
    assert book.why_not(A) == ""
    assert book.found_again(A, "/copy") == ()


def test_an_acknowledged_adapter_that_has_moved_is_checked_where_it_is_now_and_read_there() -> None:
    book = AdapterBook()
    set_list(book, 1, [source()])
    book.checked(source(), "")
    moved = source(directory="/moved")
    assert set_list(book, 1, [moved]) == [moved]
    assert book.why_not(A) == "", "it can be used meanwhile"
    book.checked(moved, "")
    assert book.directory_of(A) == "/moved"
    assert set_list(book, 1, [moved]) == []
    again = source(directory="/again")
    set_list(book, 1, [again])
    book.checked(again, "unsound")
    assert book.why_not(A) == "unsound", "nobody names the directory where it was found"


def test_an_adapter_that_a_router_names_where_it_is_unsound_is_read_where_another_one_names_it() -> None:
    book = AdapterBook()
    set_list(book, 1, [source()])
    book.checked(source(), "")
    copy = source(directory="/copy")
    assert set_list(book, 2, [copy]) == [copy]
    book.checked(copy, "unsound")
    assert (book.why_not(A), book.directory_of(A)) == ("", "/one")


def test_what_no_router_wants_any_more_is_not_checked() -> None:
    book = AdapterBook()
    book.set_list(1, [source(), source("two", B, "/two")])
    book.set_list(1, [source("two", B, "/two")])
    assert book.next_check() == source("two", B, "/two")
    assert book.next_check() is None
    book.set_list(1, [source("two", B, "/two")])
    assert book.next_check() is None, "it is being checked"


def test_a_refused_adapter_can_be_checked_again_and_stays_refused_until_then() -> None:
    book = AdapterBook()
    book.check_again(A)
    set_list(book, 1, [source()])
    book.checked(source(), "no memory")
    book.check_again(A)
    book.check_again(A)
    assert (book.next_check(), book.next_check()) == (source(), None)
    assert book.why_not(A) == "no memory"
    book.checked(source(), "")
    assert book.why_not(A) == ""
    book.check_again(A)
    assert book.next_check() is None


def test_an_acknowledged_adapter_may_be_refused_later() -> None:
    book = AdapterBook()
    book.refuse(A, "unknown ones stay so")
    set_list(book, 1, [source()])
    book.checked(source(), "")
    book.refuse(A, "gone")
    assert book.report_for(1) == AdapterReport([AdapterStatus(A, "gone")])


def test_unsound_and_too_many_entries_are_left_out() -> None:
    book = AdapterBook()
    unsound = [source("bad name"), source(digest="12"), source(directory="relative"), source(directory="/x\n")]
    many = [source(f"n{number}", f"{number:064x}") for number in range(MAX_LISTED + 5)]
    assert set_list(book, 1, [*unsound, *many]) == many[:MAX_LISTED]


def test_operators_see_names_states_and_reasons() -> None:
    book = AdapterBook()
    set_list(book, 1, [source(), source("two", B, "/two"), source("three", "c" * 64, "/three")])
    set_list(book, 2, [source("also-one")])
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
