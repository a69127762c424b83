"""Suggests what was probably meant by a wrong command line."""

from __future__ import annotations

import re
from typing import Any

_OTHER_NAMES = {"serve": "up", "start": "up", "run": "up", "launch": "up", "stop": "down", "ps": "status", "ls": "get"}
"""Our names of commands that other programs call otherwise, and whose spelling is not alike."""


def explained(error: Any) -> str:
    """The message of typer's error about a command line, which suggests what was probably meant."""
    message = str(error.format_message())
    unknown = re.match(r"No such command '([a-z-]+)'", message)
    if unknown is not None and error.ctx.parent is None and unknown[1] in _OTHER_NAMES:
        return f"{unknown[0]}. Did you mean '{_OTHER_NAMES[unknown[1]]}'?"
    option = getattr(error, "option_name", None)
    if option is not None and error.ctx is not None:
        names = {name for one in error.ctx.command.params for name in (*one.opts, *one.secondary_opts)}
        longer = [name for name in names if option.startswith("--") and name.startswith(option)]
        if len(longer) == 1:
            return f"No such option: {option}. Did you mean '{longer[0]}'?"
    return message
