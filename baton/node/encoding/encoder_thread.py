"""The thread that encodes inputs (images, speech, texts), so that no step waits for an encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import structlog

from baton.clock import Clock
from baton.engine.encoder_cache import EncoderInput
from baton.engine.runner import ModelRunner
from baton.errors import BatonError, EngineFault

_log = structlog.get_logger(__name__)


class EncoderThread:
    """Encodes one input at a time. `encode` returns at once; its callbacks run on the thread."""

    def __init__(self, runner: ModelRunner, clock: Clock, on_encoded: Callable[[int, float], None]) -> None:
        """`on_encoded` is told on the thread of how many rows were made, and how many seconds that took."""
        self._runner = runner
        self._clock = clock
        self._on_encoded = on_encoded
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="baton-encoder")
        self._waiting: dict[str, Future[None]] = {}
        """What is still to be encoded, by digest; only the engine's thread looks at it."""

    def encode(
        self, each: EncoderInput, done: Callable[[str], None], failed: Callable[[str, BatonError], None]
    ) -> None:
        """Have the runner encode an input, then call `done` with its digest, or `failed` with the reason, too: an
        InvalidRequest if the input is at fault.
        """

        def run() -> None:
            began = self._clock.monotonic()
            try:
                self._runner.encoder.encode(each.content, each.num_rows)
            except BatonError as error:
                failed(each.digest, error)
            except Exception as error:
                _log.exception("could not encode an input: the requests that need it fail")
                failed(each.digest, EngineFault(f"the encoder failed: {error!r}"))
            else:
                self._on_encoded(each.num_rows, self._clock.monotonic() - began)
                done(each.digest)

        self._waiting = {digest: future for digest, future in self._waiting.items() if not future.done()}
        self._waiting[each.digest] = self._pool.submit(run)

    def cancel(self, digests: Iterable[str]) -> None:
        """Give up these inputs, except one that is being encoded already."""
        for digest in digests:
            if (future := self._waiting.pop(digest, None)) is not None:
                future.cancel()

    def close(self) -> None:
        """Give up all inputs. One that is being encoded may take long, and is not waited for: its rows are not kept.

        Idempotent. No callback may matter any more.
        """
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._runner.encoder.forget(None)
