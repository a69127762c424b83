"""Renders docs/configuration.md from the settings in baton/config/node.py. Run by scripts/configuration."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from baton.cli.options import default_text, metavar
from baton.config.load import NOT_FROM_OUTSIDE
from baton.config.node import (
    ClusterSettings,
    NodeConfig,
    NodeSettings,
    RouterConfig,
    RouterSettings,
    UpConfig,
)
from baton.config.setting import flag_of, switches

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
HEAD = """\
# Configuration

<!-- Rendered by scripts/configuration from baton/config/node.py. -->

Three commands start processes: `baton up` starts a whole cluster on one machine, `baton node` one node and `baton
router` one router. Each setting can be given in three ways. A flag has precedence over the environment variable, the
variable over the file, and the file over the default.

| | written as |
|---|---|
| flag | `--max-num-seqs 64` |
| environment variable | `BATON_MAX_NUM_SEQS=64` |
| file | `max_num_seqs = 64` |

The file is the one that `--config` or `BATON_CONFIG` names, or else `baton.toml` in the current directory. A key at
the top of the file holds for all commands, a key in the table `[up]`, `[node]` or `[router]` for this command alone:

```toml
max_num_seqs = 64

[router]
max_queue = 4096
```

`baton config view [up|node|router] --origin` shows the value of each setting and where it comes from. Sizes are
written like `256MiB` or `40GiB`. An unknown key is an error, and the message names the key that was probably meant.

`baton up` takes the settings of all processes, of nodes and of routers, and passes them on to the processes that they
concern. The `flags` of the Helm chart take all flags of `baton node` and `baton router` without their dashes.
"""


def main() -> int:
    """Write the page, or compare it with `--check`."""
    page = render()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
        print("scripts/configuration: docs/configuration.md is out of date; run scripts/configuration", file=sys.stderr)
        return 1
    return 0


def render() -> str:
    """The page."""
    common, nodes, routers = (set(kind.model_fields) for kind in (ClusterSettings, NodeSettings, RouterSettings))
    tables = {
        "All processes: `baton up`, `baton node`, `baton router`": dict(ClusterSettings.model_fields),
        "Nodes: `baton up`, `baton node`": dict(NodeSettings.model_fields),
        "Routers: `baton up`, `baton router`": dict(RouterSettings.model_fields),
        "`baton up` alone": _own(UpConfig, nodes | routers | common),
        "`baton node` alone": _own(NodeConfig, nodes | common),
        "`baton router` alone": _own(RouterConfig, routers | common),
    }
    return HEAD + "".join(f"\n## {title}\n\n{_table(fields)}" for title, fields in tables.items())


def _own(model: type[BaseModel], shared: set[str]) -> dict[str, FieldInfo]:
    fields = model.model_fields
    return {key: field for key, field in fields.items() if key not in shared and key not in NOT_FROM_OUTSIDE}


def _table(fields: Mapping[str, FieldInfo]) -> str:
    return "| flag | value | default | meaning |\n|---|---|---|---|\n" + "".join(_rows(fields))


def _rows(fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    for key, field in fields.items():
        is_switch = field.annotation is bool
        flags = " ".join(f"`{flag}`" for flag in (switches(key, field) if is_switch else [flag_of(key)]))
        value = "" if is_switch else f"`{metavar(field)}`".replace("|", "\\|")
        default = "required" if field.is_required() else default_text(field)
        yield f"| {flags} | {value} | {default} | {(field.description or '').replace('|', chr(92) + '|')} |\n"


if __name__ == "__main__":
    sys.exit(main())
