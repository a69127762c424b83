"""The fake of `AdapterHandler`: the commands about adapters that a router carries out for operators."""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import AdapterRefused, UnknownModel
from baton.messages.adapters import AdapterRefusal, AdapterRow, LoadedAdapter


class FakeAdapterHandler:
    """Names any adapter outside of the directory /bad, which is refused; its digest is 64 times the letter a."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        """The directory of each name."""

    async def load_adapter(self, name: str, directory: str, *, replaces: bool = False) -> LoadedAdapter:
        """Raises AdapterRefused."""
        if directory == "/bad":
            raise AdapterRefused("p1: /bad is unsound")
        unchanged = self.names.get(name) == directory
        self.names[name] = directory
        return LoadedAdapter("a" * 64, 8, 1024, unchanged, ["d1: /x is not there"] if replaces else [])

    async def unload_adapter(self, name: str) -> None:
        """Raises UnknownModel."""
        if name not in self.names:
            raise UnknownModel("lora_name", f"no adapter has the name {name!r}")
        del self.names[name]

    def list_adapters(self) -> Sequence[AdapterRow]:
        refusals = [AdapterRefusal("d1", "why")]
        return [AdapterRow(name, "a" * 64, directory, ["p1"], refusals) for name, directory in self.names.items()]
