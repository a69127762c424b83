"""The threads that compile JSON schemas to grammars, so that neither engine nor event loop waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from baton.config import NodeConfig
from baton.engine.constraints import TokenMatcher
from baton.engine.request import Request
from baton.engine.runner import ModelInfo
from baton.errors import BatonError, ConfigError, EngineFault, InvalidRequest
from baton.fair_executor import FairExecutor
from baton.messages.ids import tenant_of
from baton.messages.node import Leg
from baton.messages.sampling import ConstraintKind
from baton.text.constraint_checker import ConstraintChecker
from baton.text.constraints.grammar import Grammars

NO_GRAMMARS = "this node's model has no text"
NUM_COMPILING = 2
"""Schemas that are compiled at the same time. It is small, because each takes a core that the engine could use."""
MAX_WAITING = 4096
"""The most schemas that may wait to be compiled."""

_log = structlog.get_logger(__name__)


class GrammarCompiler:
    """Compiles JSON schemas, tenants in turn. `compile` returns at once; its callbacks run on a thread of their own."""

    def __init__(
        self,
        matcher: Callable[[str, ConstraintKind], TokenMatcher] | None,
        why_none: str = "",
        checker: ConstraintChecker | None = None,
        close: Callable[[], None] | None = None,
    ) -> None:
        """`matcher` compiles a constraint, or raises BatonError; None: requests with one fail because of `why_none`.

        `checker` checks each schema before `matcher` gets it, and is closed with this compiler. `close` ends what
        `matcher` needs, once nothing is compiled any more.
        """
        self._matcher = matcher
        self._why_none = why_none
        self._checker = checker
        self._close_matcher = close
        self._threads = FairExecutor("baton-grammars", NUM_COMPILING, MAX_WAITING)
        self._is_closed = False

    def compile(
        self, request: Request, done: Callable[[Sequence[TokenMatcher]], None], failed: Callable[[BatonError], None]
    ) -> None:
        """Compile the schema of a request, then call `done` with a matcher for each of its sequences, or `failed` with
        the reason: an InvalidRequest if the schema is at fault.

        Nothing of the request that the engine may change is read after this call.
        """
        make, params, checker = self._matcher, request.sampling_params, self._checker
        constraint = params.constraint
        assert constraint is not None
        if make is None:
            failed(InvalidRequest(constraint.kind, self._why_none))
            return
        num_sequences = 1 if request.leg is Leg.PREFILL else params.n
        output = tuple(request.output_token_ids)

        def run() -> None:
            try:
                if checker is not None:
                    checker.check(*constraint)
                matchers = [make(*constraint) for _ in range(num_sequences)]
                # This is done here and not in the engine, because the output of an earlier attempt may be long.
                for matcher in matchers:
                    matcher.advance(output)
                    matcher.take_seconds()  # those of this thread, which are none of a step
                done(matchers)
            except BatonError as error:
                failed(error)
            except Exception as error:
                _log.exception("could not compile the constraint of a request: the request fails")
                failed(EngineFault(f"{constraint.kind}: {error!r}"))

        if self._is_closed:
            return
        try:
            self._threads.submit(tenant_of(request.request_id), run)
        except BatonError as error:
            failed(error)

    def close(self) -> None:
        """Wait for schemas that are being compiled; no callback is called for those that wait. Idempotent."""
        self._is_closed = True
        if self._checker is not None:
            self._checker.close()
        self._threads.close()
        if self._close_matcher is not None:
            self._close_matcher()


def load_compiler(config: NodeConfig, model: ModelInfo) -> GrammarCompiler:
    """Load the compiler for a node's model. It may take a second, so call it before the node serves."""
    if config.runner != "torch" or config.role == "encode":
        return GrammarCompiler(None, NO_GRAMMARS)
    try:
        grammars = Grammars.load(config.model, model.vocab_size, model.eos_token_ids)
    except ConfigError as error:
        _log.warning("requests with a JSON schema will fail on this node", reason=str(error))
        return GrammarCompiler(None, str(error))
    return GrammarCompiler(grammars.matcher, checker=ConstraintChecker(), close=grammars.close)
