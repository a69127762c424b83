"""The result file of a benchmark: JSON of one schema for all commands, measured or simulated.

{schema: "baton.bench/1", kind: serve | compare | nodes | simulate | validate | overload, created, machine, versions,
 command, seed, workload: {...},
 arrangements: [{name, cores, gpus, goodput?: {...},
                 rates: [{rate, summary: {vLLM's keys}, ttft_histogram?, itl_histogram?: {edges_s, counts},
                          attainment_by_scale?: [[times the SLO, share], ...], outcomes?: {column: [...]},
                          timeline?: {node: [[start_s, end_s, kind, tokens], ...]}, ttft_parts?: {queue: ms, ...},
                          generator?: {...}, node_metrics?: {node: {...}},
                          tenants?: {what `baton.bench.results.tenants` says}}]}],
 ... fields of the kind}
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from baton.bench.results.host import processor, usable_cores
from baton.errors import InvalidRequest

SCHEMA = "baton.bench/1"
KINDS = ("serve", "compare", "nodes", "simulate", "validate", "overload")
Result = dict[str, Any]
_HIDDEN = "..."
_PASSWORD = re.compile(r"(://[^/@:\s]*:).*@")
_PACKAGES = ("baton-serve", "torch", "transformers", "nixl-cu13", "grpcio", "numpy")


def new_result(
    kind: str, workload: Mapping[str, Any], arrangements: Sequence[Mapping[str, Any]], seed: int, created: str
) -> Result:
    """Makes a result that names this machine, its versions and the command. `created`: ISO 8601."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "created": created,
        "machine": machine(),
        "versions": versions(),
        "command": ["baton", *without_secrets(sys.argv[1:])],
        "seed": seed,
        "workload": dict(workload),
        "arrangements": [dict(arrangement) for arrangement in arrangements],
    }


def without_secrets(words: Sequence[str]) -> list[str]:
    """The command line without the value of --api-key and without passwords in URLs."""
    shown = []
    for before, word in zip(("", *words), words, strict=False):
        if before == "--api-key":
            word = _HIDDEN
        elif word.startswith("--api-key="):
            word = f"--api-key={_HIDDEN}"
        shown.append(_PASSWORD.sub(rf"\1{_HIDDEN}@", word))
    return shown


def machine() -> dict[str, Any]:
    """Describes this machine."""
    return {
        "processor": processor(),
        "usable_cores": usable_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter."""
    named = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            named[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return named


def without_outcomes(result: Result) -> Result:
    """The result for printing: columns with one value per request are left out."""
    arrangements = [
        arrangement
        | {"rates": [{key: value for key, value in rate.items() if key != "outcomes"} for rate in arrangement["rates"]]}
        for arrangement in result["arrangements"]
    ]
    return result | {"arrangements": arrangements}


def write_result(path: Path, result: Result) -> None:
    """Writes strict JSON; raises OSError."""
    write_text(json.dumps(result, allow_nan=False) + "\n", path)


def write_text(text: str, path: Path) -> None:
    """Writes the file atomically: a reader never sees half of it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        # A name in a result may hold half a surrogate pair, which JSON can express and UTF-8 can't.
        partial.write_text(text, encoding="utf-8", errors="replace")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_result(path: Path) -> Result:
    """Reads a result file; raises InvalidRequest for anything else, and OSError."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InvalidRequest(str(path), f"not JSON: {error}") from None
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        raise InvalidRequest(str(path), f"not a result of `baton bench` ({SCHEMA})")
    if result.get("kind") not in KINDS:
        raise InvalidRequest(str(path), f"kind is {result.get('kind')!r}, which is not one of {', '.join(KINDS)}")
    arrangements = result.get("arrangements")
    if not isinstance(arrangements, list) or not all(
        isinstance(arrangement, dict) and "rates" in arrangement for arrangement in arrangements
    ):
        raise InvalidRequest(str(path), "the field arrangements is missing or is not a list of objects with rates")
    return result
