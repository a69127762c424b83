"""The thread that encodes inputs (images), so that no step waits for an encoder."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog

from baton.engine.encoder_input import EncoderInput
from baton.engine.runner import ModelRunner
from baton.errors import BatonError, EngineFault

_log = structlog.get_logger(__name__)


class EncoderThread:
    """Encodes one input at a time. `encode` returns at once; its callbacks run on the thread."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="baton-encoder")

    def encode(
        self, each: EncoderInput, done: Callable[[str], None], failed: Callable[[str, BatonError], None]
    ) -> None:
        """Have the runner encode an input, then call `done` with its digest, or `failed` with the reason, too: an
        InvalidRequest if the input is at fault.
        """

        def run() -> None:
            try:
                self._runner.encode(each.content, each.num_rows)
            except BatonError as error:
                failed(each.digest, error)
            except Exception as error:
                _log.exception("could not encode an image: the requests that need it fail")
                failed(each.digest, EngineFault(f"the encoder failed: {error!r}"))
            else:
                done(each.digest)

        self._pool.submit(run)

    def close(self) -> None:
        """Wait for the input that is being encoded; the others are not. Idempotent. No callback may matter any more."""
        self._pool.shutdown(cancel_futures=True)
