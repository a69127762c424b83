"""Renders the Helm chart and validates it against the schemas of Kubernetes.

It is run as a program, by a Python that has helm_python and kubernetes_validate.

Standard input: {"chart": DIR, "cases": [{"values", "versions": [...]}], "compose": [...]}. Standard output: "cases",
each {"error": why it does not render} or {"objects": [...], "complaints": [...]}; "lint"; "compose", the errors of
each.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import sys
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
import yaml

POD_HOMES = {
    "LeaderWorkerSet": lambda spec: [spec["leaderWorkerTemplate"]["workerTemplate"]],
    "DisaggregatedSet": lambda spec: [role["spec"]["leaderWorkerTemplate"]["workerTemplate"] for role in spec["roles"]],
}
"""The pod templates of kinds that are not built into Kubernetes."""


# Without a cache it reads megabytes for each object.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


def main() -> None:
    task = json.load(sys.stdin)
    with helm_python.Chart.load(task["chart"]) as chart:
        answers = [answer(chart, case) for case in task["cases"]]
    lint = helm_python.lint(task["chart"], task["cases"][0]["values"], strict=True)
    json.dump({"cases": answers, "lint": lint, "compose": compose_complaints(task["compose"])}, sys.stdout)


def answer(chart: Any, case: dict[str, Any]) -> dict[str, Any]:
    try:
        chart.validate_schema(case["values"])
        rendered = chart.render(case["values"], name="demo", namespace="prod")
    except helm_python.HelmError as error:
        return {"error": str(error)}
    texts = [text for path, text in rendered.items() if path.endswith(".yaml")]
    objects = [each for text in texts for each in yaml.safe_load_all(text) if each is not None]
    found = [error for each in objects for version in case["versions"] for error in complaints(each, version)]
    return {"objects": objects, "complaints": found}


def complaints(each: dict[str, Any], version: str) -> list[str]:
    """Return the errors that Kubernetes of this version finds in an object; for custom kinds, in its pods."""
    if each["kind"] in POD_HOMES:
        pods = POD_HOMES[each["kind"]](each["spec"])
        return [error for pod in pods for error in complaints(deployment_of(pod), version)]
    if each["kind"] == "ServiceMonitor":
        return []
    try:
        kubernetes_validate.validate(each, version, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        where = ".".join(map(str, getattr(error, "path", [])))
        return [f"{version} {each['kind']} {each['metadata']['name']} {where}: {error.message}"]
    return []


def deployment_of(pod: dict[str, Any]) -> dict[str, Any]:
    spec = {"selector": {"matchLabels": pod["metadata"]["labels"]}, "template": pod}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "pod"}, "spec": spec}


def compose_complaints(documents: list[Any]) -> list[list[str]]:
    """Return the errors of each document by the compose specification."""
    schema = json.loads(importlib.resources.files("compose").joinpath("config/compose_spec.json").read_text())
    validator = jsonschema.Draft7Validator(schema)
    return [[error.message for error in validator.iter_errors(document)] for document in documents]


main()
