"""The code that routers, prefill nodes and decode nodes share: engine, wire, registry, text, command line and more.

`LLM`, `SamplingParams` and the results of `LLM` are here for programs that compute a model in their own process. They
are loaded when they are first used, so that importing this package takes no time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.offline import LLM, CompletionOutput, EmbeddingOutput, RequestOutput, RequestsFailed, SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "RequestOutput",
    "RequestsFailed",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        # Not an import statement: everything imports this package, and must not depend on offline use with it.
        return getattr(import_module("baton.offline"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
