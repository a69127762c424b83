"""The fake of `RowSource`: it gives the rows that a test put into it, when the test says so."""

from __future__ import annotations

from collections.abc import Callable

from baton.engine.encoder_cache import EncoderInput


class FakeRowSource:
    """Answers on the thread that asks, unless it `waits`."""

    def __init__(self) -> None:
        self.rows: dict[str, bytes] = {}
        """By the digests of the inputs."""
        self.waits = False
        self.asked: list[str] = []
        """The digests of all inputs that were asked for."""
        self.encoded_rows: list[int] = []
        """The numbers of rows of which it heard that the encoder made them."""
        self._open: list[Callable[[], None]] = []

    def fetch(self, each: EncoderInput, done: Callable[[bytes], None], none: Callable[[], None]) -> None:
        self.asked.append(each.digest)

        def answer() -> None:
            rows = self.rows.get(each.digest)
            none() if rows is None else done(rows)

        self._open.append(answer)
        if not self.waits:
            self.answer()

    def encoded(self, num_rows: int, seconds: float) -> None:
        self.encoded_rows.append(num_rows)

    def answer(self) -> None:
        """Answer all that were asked and have no answer yet."""
        waiting, self._open = self._open, []
        for answer in waiting:
            answer()
