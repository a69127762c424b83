"""Starts the tracer of a process, if its environment asks for traces."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from baton.observe.tracing import Tracer

_log = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def start_tracing(environ: Mapping[str, str], role: str, name: str, incarnation: str) -> Tracer | None:
    """The tracer of this process; None if the environment asks for none, or if it can't be made, which is logged."""
    if not is_asked_for(environ):
        return None
    try:
        from baton.observe.otel import OtelTracer, exporter_of

        return OtelTracer(exporter_of(environ), role, name, incarnation)
    except ImportError as error:
        _log.warning("no traces, though OTEL_* asks for them (%s): pip install 'baton-serve[otel]'", error)
    except ValueError as error:
        _log.warning("no traces: %s", error)
    return None


def is_asked_for(environ: Mapping[str, str]) -> bool:
    """Whether the environment says where to send traces, or what to do with them, and does not switch them off."""
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").lower()
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return False
    return bool(exporter) or any(environ.get(name) for name in _ENDPOINTS)
