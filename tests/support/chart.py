"""Renders the Helm chart and validates it against the schemas of Kubernetes.

It is run as a program, by a Python that has helm_python and kubernetes_validate.

Standard input: {"chart": DIR, "cases": [{"name", "values", "versions": [...]}], "compose": [...], "custom": OBJECT}.

Standard output: "cases", each {"error": why it does not render} or {"objects": [...], "complaints": [...]}; "lint";
"compose", the errors of each; "custom", the errors of this object of a custom kind; "packaged", the texts of the files
in the chart's archive.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
import yaml

POD_HOMES = {
    "LeaderWorkerSet": lambda spec: [spec["leaderWorkerTemplate"]],
    "DisaggregatedSet": lambda spec: [role["spec"]["leaderWorkerTemplate"] for role in spec["roles"]],
}
"""Where the pod templates of kinds are that are not built into Kubernetes."""
CUSTOM_KINDS = yaml.safe_load((Path(__file__).parent / "custom_resources.yaml").read_text())["kinds"]
"""The JSON schemas of other kinds that are not built in."""


# Without a cache it reads megabytes for each object.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


def main() -> None:
    task = json.load(sys.stdin)
    with helm_python.Chart.load(task["chart"]) as chart:
        answers = [answer(chart, case) for case in task["cases"]]
    lint = helm_python.lint(task["chart"], task["cases"][0]["values"], strict=True)
    with tempfile.TemporaryDirectory() as directory:
        archive = Path(helm_python.package(task["chart"], destination=directory))
        shutil.unpack_archive(archive, directory)
        archive.unlink()
        files = [path for path in Path(directory).rglob("*") if path.is_file()]
        packaged = {str(path.relative_to(directory)): path.read_text() for path in files}
    compose, custom = compose_complaints(task["compose"]), complaints(task["custom"], "")
    said = {"cases": answers, "lint": lint, "compose": compose, "custom": custom}
    json.dump({**said, "packaged": packaged}, sys.stdout)


def answer(chart: Any, case: dict[str, Any]) -> dict[str, Any]:
    try:
        chart.validate_schema(case["values"])
        rendered = chart.render(case["values"], name=case["name"], namespace="prod")
    except helm_python.HelmError as error:
        return {"error": str(error)}
    texts = [text for path, text in rendered.items() if path.endswith(".yaml")]
    objects = [each for text in texts for each in yaml.safe_load_all(text) if each is not None]
    found = [error for each in objects for version in case["versions"] for error in complaints(each, version)]
    return {"objects": objects, "complaints": found}


def complaints(each: dict[str, Any], version: str) -> list[str]:
    """Return the errors that Kubernetes of this version finds in an object.

    Of kinds that are not built in, pods are held against it, and other fields against schemas of our own.
    """
    if schema := CUSTOM_KINDS.get(each["kind"]):
        errors = jsonschema.Draft7Validator(schema).iter_errors(each)
        found = [f"{each['kind']} {each['metadata']['name']} {error.json_path}: {error.message}" for error in errors]
        homes = POD_HOMES[each["kind"]](each["spec"]) if each["kind"] in POD_HOMES else []
        pods = [home[name] for home in homes for name in ("leaderTemplate", "workerTemplate") if name in home]
        return found + [error for pod in pods for error in complaints(deployment_of(pod), version)]
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
