"""Renders docs/configuration.md from the settings' classes in baton/config. Run by scripts/configuration."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from generated_parts import keep

from baton.config import MODELS
from baton.config.setting import Setting, settings_of

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
EXAMPLE = """\
# All commands: the key is at the top.
model = "/models/Qwen2.5-7B-Instruct"
max_num_seqs = 128
kv_cache_memory = "40GiB"

[up]
prefill = 1
decode = 3

[router]
flight_record_s = 600
"""
HEAD = f"""\
# Configuration

<!-- Rendered by scripts/configuration from the classes in baton/config. -->

Three commands start processes: `baton up` starts a whole cluster on one machine, `baton node` one node and `baton
router` one router. Each of their settings can be given as a flag, as an environment variable, or as a key of a
configuration file.

## Precedence

A flag has precedence over the environment variable, the variable over the file, and the file over the default.
`baton config view up --origin` (or `node`, or `router`) shows the value of each setting and where it comes from.

`baton up` passes all settings of nodes and routers that it has itself to the processes that it starts, as flags. So a
key in the tables `[node]` and `[router]` has an effect under `baton up` only if `baton up` has no such setting.

## The file

The file is the one that `--config` or `BATON_CONFIG` names, else `baton.toml` in the current directory. A key at the
top holds for all commands, a key in the table `[up]`, `[node]` or `[router]` for this command alone, where it has
precedence over the key at the top:

```toml
{EXAMPLE}```

Sizes are numbers of bytes, or texts such as `"256MiB"`. Switches are `true` or `false`. An unknown key is an error, and
the message names the key that was probably meant. So is an environment variable whose name is almost that of a setting.

A registry's URL that contains a password belongs in `BATON_REGISTRY`, because other users of a machine can read command
lines. The `flags` of the Helm chart are the flags below without their dashes.
"""
TITLES = {"up": "a cluster on this machine", "node": "one prefill or decode node", "router": "one router"}
COLUMNS = ("setting", "flag", "environment variable", "value", "default", "what it does")


def main() -> int:
    """Writes the page; with `--check` compares it and returns 1 if it is out of date."""
    return keep(PAGE, render(), only_compare="--check" in sys.argv[1:])


def render() -> str:
    """The page: a section for each command, with a table for each group of its settings."""
    return HEAD + "".join(_section(command) for command in MODELS)


def _section(command: str) -> str:
    groups: dict[str, list[Setting]] = {}
    for setting in settings_of(MODELS[command]).values():
        if not setting.is_internal:
            groups.setdefault(setting.heading, []).append(setting)
    tables = "".join(f"\n### {heading}\n\n{_table(settings)}" for heading, settings in groups.items())
    return f"\n## `baton {command}`: {TITLES[command]}\n{tables}"


def _table(settings: Iterable[Setting]) -> str:
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(_row, settings)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(setting: Setting) -> tuple[str, ...]:
    default = "required" if setting.is_required else setting.default_text or ("off" if setting.is_switch else "")
    cells = (
        f"`{setting.key}`",
        " ".join(f"`{flag}`" for flag in setting.flags),
        f"`{setting.variable}`",
        "`true` `false`" if setting.is_switch else f"`{setting.value_name}`",
        "on" if setting.is_switch and default == "yes" else default,
        setting.description,
    )
    return tuple(cell.replace("|", "\\|") for cell in cells)


if __name__ == "__main__":
    sys.exit(main())
