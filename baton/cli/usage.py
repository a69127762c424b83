"""Bad usage of a command that is a client: exit code 2, as for every other tool of the shell."""

from __future__ import annotations

from baton.errors import ExitCode, UsageError


class ClientUsageError(UsageError):
    """A command line of a client command that makes no sense."""

    exit_code = ExitCode.USAGE
