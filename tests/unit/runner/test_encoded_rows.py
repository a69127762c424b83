"""Rows of inputs that are kept: what is made while all are forgotten belongs to nobody, and harms nobody."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.runner.execution.encoded_rows import EncodedRows

ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)


def test_rows_that_are_made_while_all_are_forgotten_are_not_kept() -> None:
    kept = EncodedRows()

    def make() -> npt.NDArray[np.float32]:
        kept.release(None)
        return ROWS

    kept.make("late", make)
    assert "late" not in kept
    kept.make("late", lambda: ROWS)
    assert bytes(kept.bytes_of("late") or b"") == ROWS.tobytes()


def test_rows_of_the_next_incarnation_stay_when_the_encoder_of_the_last_one_is_done() -> None:
    kept = EncodedRows()

    def make() -> npt.NDArray[np.float32]:
        kept.release(None)
        kept.keep("same", 3, ROWS.tobytes())
        return np.zeros((3, 2), dtype=np.float32)

    kept.make("same", make)
    assert bytes(kept.bytes_of("same") or b"") == ROWS.tobytes()
