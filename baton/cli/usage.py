"""The error for a wrong command line of a client command, with exit code 2 as other shell tools have it."""

from __future__ import annotations

from baton.errors import ExitCode, UsageError


class ClientUsageError(UsageError):
    """A client command has options or arguments that are wrong or do not go together."""

    exit_code = ExitCode.USAGE
