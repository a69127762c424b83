"""Renders YAML with PyYAML. Imported only where YAML is printed, because PyYAML takes 80 ms to import."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

try:
    from yaml import CSafeDumper as SafeDumper
except ImportError:
    from yaml import SafeDumper  # type: ignore[assignment]

_AMBIGUOUS = re.compile(r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|0o[0-7]+|[yYnN])\Z")
"""Text that PyYAML would leave unquoted, but that is a number in YAML 1.2 or a boolean in YAML 1.1."""

_NO_FOLDING = (1 << 31) - 1
"""The largest width that libyaml takes: long text stays on one line."""


class _Dumper(SafeDumper):
    pass


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Represent text of several lines as a literal block, and text with control characters in double quotes."""
    style = '"' if not text.replace("\n", "").isprintable() else "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
# Text that matches is quoted, because a reader could resolve it to another type.
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _AMBIGUOUS, list("-+.0123456789yYnN"))


def yaml_text(value: Any) -> str:
    """One document in block style with the same types, keys and order as `value` has in JSON.

    Text is quoted if a reader of YAML 1.1 or 1.2 could take it for another type.
    """
    plain = json.loads(json.dumps(value, default=str))
    return yaml.dump(plain, Dumper=_Dumper, allow_unicode=True, sort_keys=False, width=_NO_FOLDING)
