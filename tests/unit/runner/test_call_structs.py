"""Python's copies of the kernels' structures equal those of the compiled library; otherwise the library is not used."""

from __future__ import annotations

import pytest

from baton.runner.backends.cpu.kernel_file import KernelsUnavailable, open_kernels
from baton.runner.backends.cpu.kernels.call_structs import Layout, check_layout, layout_here, layout_of


def test_both_sides_agree_on_every_field() -> None:
    compiled = layout_of(open_kernels())
    assert compiled == layout_here()
    assert compiled["attention_call", "softcap"][1] == 4
    assert ("norm_call", "column_stride") in compiled
    assert compiled["operation_kind", "TAKE_ROWS"] == (5, 0)


def moved(layout: Layout) -> None:
    layout["step", "rows"] = (0, 8)


def wider(layout: Layout) -> None:
    layout["linear_call", ""] = (0, layout["linear_call", ""][1] + 8)


def added(layout: Layout) -> None:
    layout["rotate_call", "interleaved"] = (72, 4)


def removed(layout: Layout) -> None:
    del layout["place", "offset"]


def renumbered(layout: Layout) -> None:
    layout["operation_kind", "NORM"] = (2, 0)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (moved, r"step\.rows"),
        (wider, "linear_call has"),
        (added, r"rotate_call\.interleaved"),
        (removed, r"place\.offset"),
        (renumbered, r"operation_kind\.NORM"),
    ],
)
def test_a_library_of_another_source_is_refused_with_the_difference(change: object, place: str) -> None:
    compiled = layout_here()
    change(compiled)  # type: ignore[operator]
    with pytest.raises(KernelsUnavailable, match=place):
        check_layout(compiled)
