"""The threads that compile grammars, so that neither the engine nor the loop waits for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from baton.config import NodeConfig
from baton.engine.request import Request
from baton.engine.runner import ModelInfo
from baton.engine.sampling.grammar import TokenMatcher
from baton.errors import BatonError, ConfigError, EngineFault, InvalidRequest
from baton.fair_executor import FairExecutor
from baton.messages.ids import tenant_of
from baton.messages.node import Leg
from baton.text.grammar import JsonGrammars
from baton.text.schema_sandbox import SchemaSandbox

NO_GRAMMARS = "this node's model has no text"
NUM_COMPILING = 2
"""Schemas that are compiled at once: each takes a core, and the engine wants all of them."""
MAX_WAITING = 4096

_log = structlog.get_logger(__name__)


class GrammarCompiler:
    """Compiles schemas, tenants in turn. Its methods return at once; what was compiled comes on a thread of its own."""

    def __init__(
        self,
        matcher: Callable[[str], TokenMatcher] | None,
        why_none: str = "",
        sandbox: SchemaSandbox | None = None,
    ) -> None:
        """`matcher` makes one of a JSON schema, or raises BatonError. None: no request may have one, and why.

        `sandbox` is closed with this; it lets schemas pass before `matcher` sees them.
        """
        self._matcher = matcher
        self._why_none = why_none
        self._sandbox = sandbox
        self._threads = FairExecutor("baton-grammars", NUM_COMPILING, MAX_WAITING)
        self._is_closed = False

    def compile(
        self, request: Request, done: Callable[[Sequence[TokenMatcher]], None], failed: Callable[[BatonError], None]
    ) -> None:
        """Call one of them, with a matcher for each sequence of the request or the reason why there is none: an
        InvalidRequest if that is the schema's.

        Reads nothing of the request that the engine could change while it waits.
        """
        make, params, sandbox = self._matcher, request.sampling_params, self._sandbox
        if make is None:
            failed(InvalidRequest("json_schema", self._why_none))
            return
        num_sequences = 1 if request.leg is Leg.PREFILL else params.n
        output = tuple(request.output_token_ids)

        def run() -> None:
            try:
                if sandbox is not None:
                    sandbox.check(params.json_schema)
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

        if self._is_closed:
            return
        try:
            self._threads.submit(tenant_of(request.request_id), run)
        except BatonError as error:
            failed(error)

    def close(self) -> None:
        """Wait for those in hand; nobody else hears anything more. Idempotent."""
        self._is_closed = True
        if self._sandbox is not None:
            self._sandbox.close()
        self._threads.close()


def load_compiler(config: NodeConfig, model: ModelInfo) -> GrammarCompiler:
    """The compiler of a node's model. May take a second: to be called before the node serves."""
    if config.runner != "torch":
        return GrammarCompiler(None, NO_GRAMMARS)
    try:
        grammars = JsonGrammars.load(config.model, model.vocab_size, model.eos_token_ids)
    except ConfigError as error:
        _log.warning("requests with a JSON schema will fail here", reason=str(error))
        return GrammarCompiler(None, str(error))
    return GrammarCompiler(grammars.matcher, sandbox=SchemaSandbox())
