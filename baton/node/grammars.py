"""The thread that compiles grammars, so that neither the engine nor the loop waits for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog

from baton.config import NodeConfig
from baton.engine.grammar import TokenMatcher
from baton.engine.request import Leg, Request
from baton.engine.runner.base import ModelInfo
from baton.errors import BatonError, ConfigError, EngineFault, InvalidRequest
from baton.text.grammar import JsonGrammars

NO_GRAMMARS = "this node's model has no text"

_log = structlog.get_logger(__name__)


class GrammarCompiler:
    """Compiles one schema after the other. Its methods return at once; what was compiled comes on its thread."""

    def __init__(self, matcher: Callable[[str], TokenMatcher] | None, why_none: str = "") -> None:
        """`matcher` makes one of a JSON schema, or raises BatonError. None: no request may have one, and why."""
        self._matcher = matcher
        self._why_none = why_none
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="baton-grammars")
        self._is_closed = False

    def compile(
        self, request: Request, done: Callable[[Sequence[TokenMatcher]], None], failed: Callable[[BatonError], None]
    ) -> None:
        """Call one of them, with a matcher for each sequence of the request or the reason why there is none: an
        InvalidRequest if that is the schema's.

        Reads nothing of the request that the engine could change while it waits.
        """
        make, params = self._matcher, request.sampling_params
        if make is None:
            failed(InvalidRequest("json_schema", self._why_none))
            return
        num_sequences = 1 if request.leg is Leg.PREFILL else params.n
        output = tuple(request.output_token_ids)

        def run() -> None:
            try:
                matchers = [make(params.json_schema) for _ in range(num_sequences)]
                # What an earlier attempt generated may be long, and the engine should not be kept by it.
                for matcher in matchers:
                    matcher.advance(output)
                done(matchers)
            except BatonError as error:
                failed(error)
            except Exception as error:
                _log.exception("a grammar could not be compiled")
                failed(EngineFault(f"json_schema: {error!r}"))

        if not self._is_closed:
            self._pool.submit(run)

    def close(self) -> None:
        """Wait for the one in hand; nobody else hears anything more. Idempotent."""
        self._is_closed = True
        self._pool.shutdown(cancel_futures=True)


def load_compiler(config: NodeConfig, model: ModelInfo) -> GrammarCompiler:
    """The compiler of a node's model. May take a second: to be called before the node serves."""
    if config.runner != "torch":
        return GrammarCompiler(None, NO_GRAMMARS)
    try:
        grammars = JsonGrammars.load(config.model, model.vocab_size, model.eos_token_ids)
    except ConfigError as error:
        _log.warning("requests with a JSON schema will fail here", reason=str(error))
        return GrammarCompiler(None, str(error))
    return GrammarCompiler(grammars.matcher)
