"""The adapters that operators have given names to, as the registry stores them: one text for each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from baton.messages.adapters import MAX_DIRECTORY_BYTES, MAX_LISTED, AdapterSource
from baton.values import value

_MOST_CHARS = MAX_DIRECTORY_BYTES + 1024
_FIELDS = {"name", "directory", "digest", "number"}


@value(frozen=True, slots=True)
class NamedAdapter:
    """An adapter under the name by which clients ask for it."""

    source: AdapterSource
    number: int = 1
    """Larger than those of the adapters that had the name before: of two that have it, the one with the larger number
    does. Two routers may have given the name at the same time."""

    @property
    def text(self) -> str:
        """The adapter as it is stored: equal adapters have equal texts."""
        source = self.source
        fields = {"name": source.name, "directory": source.directory, "digest": source.digest, "number": self.number}
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> NamedAdapter | None:
        """The adapter in a stored text; None if Baton has not written it."""
        if len(text) > _MOST_CHARS:
            return None
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or found.keys() != _FIELDS:
            return None
        number = found.pop("number")
        if not all(isinstance(part, str) for part in found.values()) or type(number) is not int or number < 1:
            return None
        named = cls(AdapterSource(**found), number)
        return named if named.source.is_sound and named.text == text else None


def named_adapters(texts: Iterable[str]) -> Mapping[str, NamedAdapter]:
    """The adapter of each name, in the order of the names; at most MAX_LISTED.

    Routers give no more than MAX_ADAPTERS names. Two that give one at the same time may exceed that: these are served.
    """
    found: dict[str, NamedAdapter] = {}
    for text in texts:
        named = NamedAdapter.parse(text)
        if named is None:
            continue
        other = found.get(named.source.name)
        if other is None or (named.number, named.text) > (other.number, other.text):
            found[named.source.name] = named
    return {name: found[name] for name in sorted(found)[:MAX_LISTED]}


def texts_of(name: str, texts: Iterable[str]) -> Sequence[str]:
    """The stored texts of all adapters that have this name."""
    return [text for text in texts if (named := NamedAdapter.parse(text)) is not None and named.source.name == name]
