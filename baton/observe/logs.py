"""Logs, set up once in each process: for people on a terminal, JSON lines elsewhere. Always to stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor

from baton.errors import UsageError
from baton.messages.ids import AttemptKey

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "text", "json")
_OF_THIS_PROCESS: dict[str, str] = {}


def log_level(verbosity: int, environ: Mapping[str, str], default: str) -> str:
    """-v is info, -vv is debug; else BATON_LOG; else the default. Raises UsageError for a level that is none."""
    if verbosity:
        return "info" if verbosity == 1 else "debug"
    level = environ.get("BATON_LOG", "").lower() or default
    if level not in LEVELS:
        raise UsageError(f"BATON_LOG={level!r} is none of {', '.join(LEVELS)}")
    return level


def log_format(flag: str | None, environ: Mapping[str, str]) -> str:
    """The flag, else BATON_LOG_FORMAT, else auto: text on a terminal, JSON elsewhere. Raises UsageError."""
    form = flag or environ.get("BATON_LOG_FORMAT", "").lower() or "auto"
    if form not in FORMATS:
        raise UsageError(f"the log format {form!r} is none of {', '.join(FORMATS)}")
    return form


def of_attempt(key: AttemptKey) -> dict[str, str | int]:
    """What a line about an attempt says of it: for `extra` of a standard logger."""
    return {"request": key.request_id, "attempt": key.attempt}


def log_also(**context: str) -> None:
    """Have each further line of this process say this, too."""
    _OF_THIS_PROCESS.update(context)


def configure_logging(
    level: str,
    *,
    environ: Mapping[str, str],
    stream: TextIO | None = None,
    form: str = "auto",
    **context: str,
) -> None:
    """Send every log of this process, libraries' included, to the stream, in a form of `FORMATS`.

    `context` is in each line.
    """
    out = sys.stderr if stream is None else stream
    _OF_THIS_PROCESS.clear()
    log_also(**context)

    def add_context(_logger: object, _method: str, event: EventDict) -> EventDict:
        # Not a context variable: those start empty in every thread.
        return {**event, **_OF_THIS_PROCESS}

    shared: list[Processor] = [
        add_context,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_rendering(out, environ, form)],
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


def _rendering(out: TextIO, environ: Mapping[str, str], form: str) -> list[Processor]:
    if form == "text" or (form == "auto" and out.isatty()):
        return [structlog.dev.ConsoleRenderer(colors=out.isatty() and not environ.get("NO_COLOR"))]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
