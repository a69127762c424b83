"""Removes passwords from text that is shown, such as the URL of a Redis."""

from __future__ import annotations

import re

HIDDEN = "***"
_CREDENTIALS = re.compile(r"(?<=://)\S*@")
_PASSWORD = re.compile(r"://[^/?#\s]*:\S*@|[?&]password=[^&\s]")
_PARAMETER = re.compile(r"(?<=[?&]password=)[^&\s]*")


def has_password(url: str) -> bool:
    """Whether the URL contains a password, before its host or as a parameter."""
    return _PASSWORD.search(url) is not None


def without_password(text: str) -> str:
    """The text with asterisks in place of user and password in every URL, for logs, messages and tables."""
    return _PARAMETER.sub(HIDDEN, _CREDENTIALS.sub(f"{HIDDEN}@", text))
