"""Renders the flags in the chart's values.schema.json, and the chart's README.md. Run by scripts/chart.

The flags are derived from the settings of `baton router` and `baton node`, without those that the chart sets itself.
The table in README.md has the values, defaults and comments of values.yaml, in its order.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from generated_parts import keep

from baton.cli.cluster.emit.helm import FLAGS_OF_THE_CHART
from baton.config import MODELS
from baton.config.setting import Setting, settings_of

CHART = Path(__file__).parent.parent / "deploy/helm/baton"
_COLUMNS = 120
_NUMBER_TEXTS = {"integer": "[0-9]+$", "number": "[0-9]+(\\.[0-9]+)?$"}
_SIZE_TEXT = "^[0-9]+(\\.[0-9]+)?([KMGT]i?B|B)?$"
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
README = """\
# Helm chart of Baton

<!-- Rendered by scripts/chart from values.yaml. -->

Routers, prefill nodes, decode nodes, encode nodes and a Redis, as Kubernetes objects. What every supervisor has to
know, and what has been tested, is in `docs/deploy.md` of the repository.

```console
$ kubectl create secret generic baton-tls --from-file=ca.crt=certs/ca.crt --from-file=router.crt=certs/router.crt ...
$ kubectl create secret generic baton-keys --from-file=keys=keys.json
$ helm install baton . --set tls.existingSecret=baton-tls --set apiKeys.existingSecret=baton-keys
```

- `values.schema.json` refuses values that do not exist, and flags that `baton router` or `baton node` do not have.
- `autoscaling` needs Deployments or LeaderWorkerSets. KEDA needs a Prometheus that scrapes the pods
  (`serviceMonitor.enabled`).
- `scaler.enabled` lets routers change the number of nodes (`docs/scaling.md`).
- `gateway` and `ingress` expose the routers' public ports alone. With `tls` the routers speak TLS, so the gateway or
  controller must, too: a BackendTLSPolicy, or an annotation of the controller.
- The rules and the dashboard in `monitoring/` are links to `deploy/monitoring` of the repository; `helm package`
  follows them.

## Values

"""


def main() -> int:
    """Writes both files; with `--check` compares them and returns 1 if one is out of date."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    rendered = {"values.schema.json": with_flags(schema), "README.md": README + values_table()}
    return max(keep(CHART / name, text, only_compare="--check" in sys.argv[1:]) for name, text in rendered.items())


def with_flags(schema: dict[str, Any]) -> str:
    """The schema's text with the flags of both commands."""
    definitions = dict(schema["definitions"])
    for command in ("router", "node"):
        definitions[f"{command}Flags"] = flags_schema(command)
    return compact({**schema, "definitions": definitions}, 0) + "\n"


def flags_schema(command: str) -> dict[str, Any]:
    """The JSON schema of a map of this command's flags."""
    properties: dict[str, Any] = {}
    fields = MODELS[command].model_json_schema()["properties"]
    for key, setting in settings_of(MODELS[command]).items():
        if setting.flag not in FLAGS_OF_THE_CHART and not setting.is_internal:
            for flag in setting.flags:
                properties[flag.removeprefix("--")] = _value_schema(setting, fields[key])
    return {"type": "object", "additionalProperties": False, "properties": dict(sorted(properties.items()))}


def _value_schema(setting: Setting, field: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a flag's value. A switch has none, so it is given (true) or not (false).

    Numbers may be texts, since Helm reads large numbers as rounded floats.
    """
    if setting.is_switch:
        return {"type": "boolean"}
    if setting.value_name == "SIZE":
        return {"type": ["integer", "string"], "minimum": 0, "pattern": _SIZE_TEXT}
    # A setting that may be absent is a choice of its type and null.
    kind = next((option for option in field.get("anyOf", ()) if option["type"] != "null"), field)
    if "enum" in kind:
        return {"enum": kind["enum"]}
    if kind["type"] == "string":
        return {"type": "string"}
    bounds = {name: kind[name] for name in _BOUNDS if name in kind}
    sign = "" if bounds.get("minimum", -1) >= 0 else "-?"
    return {"type": [kind["type"], "string"], **bounds, "pattern": f"^{sign}{_NUMBER_TEXTS[kind['type']]}"}


def compact(value: Any, depth: int, used: int = 0) -> str:
    """JSON text in which whatever fits in a line is in one. `used` is the number of columns before and after it."""
    line = json.dumps(value)
    if not isinstance(value, dict) or (depth > 0 and 2 * depth + used + len(line) <= _COLUMNS):
        return line
    inner = "  " * (depth + 1)
    items = [f"{inner}{json.dumps(key)}: {compact(member, depth + 1, len(key) + 5)}" for key, member in value.items()]
    return "{\n" + ",\n".join(items) + "\n" + "  " * depth + "}"


def values_table() -> str:
    """The table of all values."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    rows = list(_rows(yaml.compose(text), text.splitlines()))
    comments = {path: comment for path, _, comment in rows}
    lines = ["| value | default | what it does |", "|---|---|---|"]
    for path, default, own in rows:
        comment = own or comments.get(f"prefill.{path.partition('.')[2]}")
        if not comment:
            raise SystemExit(f"scripts/chart: {path} has no comment in values.yaml")
        lines.append(f"| `{path}` | {default} | {comment} |")
    return "\n".join(lines) + "\n"


def _rows(node: Any, lines: list[str], path: str = "") -> Iterator[tuple[str, str, str]]:
    """Path, default and comment of each value. A mapping in block style is a group of values, except resources."""
    for key, value in node.value:
        key_path = f"{path}.{key.value}" if path else key.value
        if isinstance(value, yaml.MappingNode) and not value.flow_style and key.value != "resources":
            yield from _rows(value, lines, key_path)
        else:
            default = json.dumps(yaml.safe_load(yaml.serialize(value)))
            yield key_path, "" if default == '""' else f"`{default}`", _comment_above(key.start_mark.line, lines)


def _comment_above(number: int, lines: list[str]) -> str:
    """The comment whose last line is above this line."""
    first = number
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return " ".join(line.strip().removeprefix("#").strip() for line in lines[first:number])


if __name__ == "__main__":
    sys.exit(main())
