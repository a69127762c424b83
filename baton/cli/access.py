"""Flags and variables with the API key and certificates that commands present to a cluster."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.security.access import Access, default_access
from baton.security.tls_files import certificate_files


def _flag(name: str, kind: Any, default: Any, text: str, metavar: str = "PATH") -> inspect.Parameter:
    words, variable = "--" + name.replace("_", "-"), f"BATON_{name.upper()}"
    settings = typer.Option(words, envvar=variable, metavar=metavar, show_default=False, help=text, hidden=not text)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, settings]
    )


_FLAGS = (
    _flag("api_key", str, "", "API key to send.", "KEY"),
    _flag("tls_ca", Path | None, None, "Certificate authority to trust. Without it the connection has no TLS."),
    _flag("tls_cert", Path | None, None, "Certificate of the operator."),
    _flag("tls_key", Path | None, None, "Private key of that certificate."),
    _flag("cluster", str, Access().cluster, "", "NAME"),
)


def add_access_flags(app: typer.Typer) -> None:
    """Add the flags to every command of an application and of its groups."""
    for command in app.registered_commands:
        if command.callback is not None:
            command.callback = with_access(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_access_flags(group.typer_instance)


def use_certificates(directory: str, cluster: str) -> None:
    """Take certificates that the user did not name from `directory`, and the cluster's name from `cluster`."""
    access = default_access.get()
    if directory and access.tls_ca is None:
        files = certificate_files(Path(directory), "operator")
        access = replace(access, tls_ca=files.ca, tls_cert=files.cert, tls_key=files.key)
    default_access.set(replace(access, cluster=cluster))


def with_access(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with the flags of this module that it does not have itself."""
    hints = typing.get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
    ]
    added = [flag for flag in _FLAGS if flag.name not in hints]

    def run(**values: Any) -> Any:
        default_access.set(Access(**{flag.name: values.pop(flag.name) for flag in added}))
        return command(**values)

    run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run
