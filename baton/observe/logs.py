"""Sets up the logs of a process: text on a terminal, JSON lines elsewhere, by default on stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor

from baton.errors import UsageError
from baton.messages.ids import AttemptKey
from baton.observe.terminal_text import shown

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "text", "json")
_PROCESS_CONTEXT: dict[str, str] = {}
"""Fields that each line of this process has."""


def log_level(verbosity: int, environ: Mapping[str, str], default: str) -> str:
    """The log level: info for -v, debug for -vv, else BATON_LOG, else the default. Raises UsageError."""
    if verbosity:
        return "info" if verbosity == 1 else "debug"
    level = environ.get("BATON_LOG", "").lower() or default
    if level not in LEVELS:
        raise UsageError(f"BATON_LOG={level!r} is none of {', '.join(LEVELS)}")
    return level


def log_format(flag: str | None, environ: Mapping[str, str]) -> str:
    """The log format: the flag, else BATON_LOG_FORMAT, else auto. Raises UsageError for an unknown one."""
    form = flag or environ.get("BATON_LOG_FORMAT", "").lower() or "auto"
    if form not in FORMATS:
        raise UsageError(f"the log format {form!r} is none of {', '.join(FORMATS)}")
    return form


def of_attempt(key: AttemptKey) -> dict[str, str | int]:
    """The fields of a log line about an attempt, for `extra` of a standard logger."""
    return {"request": key.request_id, "attempt": key.attempt}


def log_also(**context: str) -> None:
    """Add these fields to each further log line of this process."""
    _PROCESS_CONTEXT.update(context)


def configure_logging(
    level: str,
    *,
    environ: Mapping[str, str],
    stream: TextIO | None = None,
    form: str = "auto",
    **context: str,
) -> None:
    """Send all logs of this process, those of libraries included, to the stream, in one of `FORMATS`.

    Each line has the fields of `context`.
    """
    out = sys.stderr if stream is None else stream
    _PROCESS_CONTEXT.clear()
    log_also(**context)

    def add_context(_logger: object, _method: str, event: EventDict) -> EventDict:
        # These fields are not in a context variable, because those start empty in every thread.
        return {**event, **_PROCESS_CONTEXT}

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


def log_to_standard_loggers() -> None:
    """Send our lines to the standard loggers (`baton`, ...) of a program that uses Baton as a library.

    Their handlers and levels are the program's own. Does nothing where logs are set up already.
    """
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, _as_extra, structlog.stdlib.render_to_log_kwargs],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


_OF_RECORDS = frozenset(vars(logging.makeLogRecord({}))) - {"exc_info", "stack_info"} | {"message", "asctime"}
"""Names that logging refuses for further fields of a line, since its records have them."""


def _as_extra(_logger: object, _method: str, event: EventDict) -> EventDict:
    """The line with no field that has the name of one of logging's own: `name` becomes `name_`."""
    return {f"{field}_" if field in _OF_RECORDS else field: value for field, value in event.items()}


def _rendering(out: TextIO, environ: Mapping[str, str], form: str) -> list[Processor]:
    if form == "text" or (form == "auto" and out.isatty()):
        colors = out.isatty() and not environ.get("NO_COLOR")
        # A traceback in colours would be written without `_as_shown`.
        console = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)
        return [structlog.processors.format_exc_info, _as_shown, console]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]


def _as_shown(_logger: object, _method: str, event: EventDict) -> EventDict:
    """The line with nothing that a terminal would obey: clients, models and libraries have a part in its texts."""
    texts = {key: value if isinstance(value, str) else repr(value) for key, value in event.items()}
    return {**event, **{key: safe for key, text in texts.items() if (safe := shown(text)) != text}}
