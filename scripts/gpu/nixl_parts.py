"""Which files of NIXL's wheel are needed to move bytes over UCX: a tenth of a wheel that has ten other plugins."""

from __future__ import annotations

import re
import subprocess
import tempfile
import zipfile
from collections import defaultdict
from pathlib import Path, PurePosixPath

_ROOTS = re.compile(r"nixl_cu\d+/|nixl_cu\d+-[^/]*\.dist-info/|.*/libplugin_UCX\.so$|.*/ucx/libuc[tm]_[^/]*\.so[.\d]*$")
"""The package itself, NIXL's plugin for UCX, and the transports that UCX loads by their names."""


def needed_parts(wheel: zipfile.ZipFile) -> set[str]:
    """The names of the files that are needed: the roots, and the wheel's libraries that they are linked with."""
    by_library = defaultdict(list)
    for name in wheel.namelist():
        by_library[PurePosixPath(name).name].append(name)
    todo = [name for name in wheel.namelist() if _ROOTS.match(name) and not name.endswith("/")]
    kept: set[str] = set()
    with tempfile.TemporaryDirectory() as directory:
        while todo:
            name = todo.pop()
            if name in kept:
                continue
            kept.add(name)
            if ".so" in PurePosixPath(name).suffixes:
                for library in _linked_with(Path(wheel.extract(name, directory))):
                    todo += by_library.get(library, [])
    return kept


def _linked_with(library: Path) -> list[str]:
    listed = subprocess.run(["readelf", "--dynamic", library], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\)\s+Shared library: \[([^\]]+)\]", listed)
