"""Logs, set up once in each process: for people on a terminal, JSON lines elsewhere. Always to stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor

from baton.errors import UsageError

LEVELS = ("debug", "info", "warning", "error")


def log_level(verbosity: int, environ: Mapping[str, str], default: str) -> str:
    """-v is info, -vv is debug; else BATON_LOG; else the default. Raises UsageError for a level that is none."""
    if verbosity:
        return "info" if verbosity == 1 else "debug"
    level = environ.get("BATON_LOG", "").lower() or default
    if level not in LEVELS:
        raise UsageError(f"BATON_LOG={level!r} is none of {', '.join(LEVELS)}")
    return level


def configure_logging(level: str, *, environ: Mapping[str, str], stream: TextIO | None = None, **context: str) -> None:
    """Send every log of this process, libraries' included, to the stream. `context` is in each line."""
    out = sys.stderr if stream is None else stream

    def add_context(_logger: object, _method: str, event: EventDict) -> EventDict:
        # Not a context variable: those start empty in every thread.
        return {**event, **context}

    shared: list[Processor] = [
        add_context,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_rendering(out, environ)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for ours in ("baton", "router", "prefill_node", "decode_node", "kv_transfer"):
        logging.getLogger(ours).setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def _rendering(out: TextIO, environ: Mapping[str, str]) -> list[Processor]:
    if out.isatty():
        return [structlog.dev.ConsoleRenderer(colors=not environ.get("NO_COLOR"))]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
