"""The Helm chart, rendered by Helm's library and validated against the schemas of several versions of Kubernetes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import yaml

from baton.cli.cluster.emit.compose import compose_files
from baton.cli.cluster.emit.helm import helm_files
from baton.cli.cluster.emit.processes import emitted_processes
from baton.cli.cluster.supervisor.plan import parse_flags
from baton.config import NodeConfig, RouterConfig, UpConfig
from tests.process.shell import ROOT

# The tools may have to be installed.
pytestmark = pytest.mark.timeout(300)
CHART = ROOT / "deploy/helm/baton"
TOOLS = ROOT / ".venv/kubernetes"
VERSIONS = ("1.25", "1.31", "1.37")
SAFE: dict[str, Any] = {"tls": {"existingSecret": "t"}, "apiKeys": {"existingSecret": "k"}}
OPEN: dict[str, Any] = {"insecure": True}
EMITTED = UpConfig.model_validate(
    {
        "prefill": 3,
        "routers": 2,
        "device": "cuda",
        "kv_cache_memory": "40GiB",
        "certs": "/c",
        "api_keys": "/k",
        "model": "/srv/m",
        "registry": "rediss://r",
    }
)
CASES: dict[str, dict[str, Any]] = {
    "safe": SAFE,
    "open": OPEN,
    "emitted": yaml.safe_load(helm_files(EMITTED, emitted_processes(EMITTED, None), "lease_s = 9\n")["values.yaml"]),
    "much": {
        **SAFE,
        "config": "lease_s = 9\n",
        "model": {"path": "/models/m", "name": "m", "volume": {"persistentVolumeClaim": {"claimName": "models"}}},
        "prefill": {"replicas": 4, "gpus": 2, "rdma": 1, "flags": {"kv-cache-memory": 42949672960, "threads": "3"}},
        "decode": {
            "podAnnotations": {"a": "b"},
            "flags": {"no-enable-prefix-caching": True, "enable-chunked-prefill": False},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
        },
        "redis": {"passwordSecret": "p"},
        "imagePullSecrets": [{"name": "s"}],
        "networkPolicy": {"clients": [{"namespaceSelector": {}}], "monitoring": [{"namespaceSelector": {}}]},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "keySecret": {"name": "monitor"}},
    },
    "one set": {**OPEN, "nodes": {"kind": "DisaggregatedSet"}},
    "sets": {**OPEN, "nodes": {"kind": "LeaderWorkerSet"}, "redis": {"enabled": False, "urlSecret": {"name": "u"}}},
    "bare": {**OPEN, "networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False}},
    "no protection": {},
    "no keys": {"tls": {"existingSecret": "t"}},
    "no registry": {**OPEN, "redis": {"enabled": False}},
    "no place for the model": {**OPEN, "model": {"volume": {"emptyDir": {}}}},
    "unknown value": {**OPEN, "prefil": {}},
    "no decode node": {**OPEN, "decode": {"replicas": 0}},
}
REFUSED = {
    "no protection": "tls.existingSecret",
    "no keys": "apiKeys.existingSecret",
    "no registry": "redis.url",
    "no place for the model": "model.path",
    "unknown value": "prefil",
    "no decode node": "decode",
}
Objects = list[dict[str, Any]]


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """What the tools say of each case; one process for all."""
    installed = subprocess.run([ROOT / "scripts/kubernetes"], capture_output=True, text=True, check=False, timeout=110)
    if installed.returncode:
        pytest.skip(f"no Helm: {installed.stderr.strip().splitlines()[-1:]}")
    composed = compose_files(EMITTED, emitted_processes(EMITTED, None), "")["compose.yaml"]
    asked = {
        "chart": str(CHART),
        "cases": [{"values": values, "versions": VERSIONS} for values in CASES.values()],
        "compose": [
            without_name((ROOT / "deploy/compose.yaml").read_text()),
            without_name(composed),
            {"services": {"a": {"imgae": "x"}}},
        ],
    }
    done = subprocess.run(
        [sys.executable, ROOT / "tests/support/chart.py"],
        env={**os.environ, "PYTHONPATH": str(TOOLS)},
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return {**said, "cases": dict(zip(CASES, said["cases"], strict=True))}


def without_name(text: str) -> dict[str, Any]:
    """A compose file without what the schema is too old to know."""
    return {key: value for key, value in yaml.safe_load(text).items() if key != "name"}


def objects(answers: dict[str, Any], case: str) -> Objects:
    found: Objects = answers["cases"][case]["objects"]
    return found


def one(found: Objects, kind: str, end: str) -> dict[str, Any]:
    (each,) = [each for each in found if each["kind"] == kind and each["metadata"]["name"].endswith(end)]
    return each


def pods(found: Objects) -> dict[str, dict[str, Any]]:
    """The pods' specifications by their component."""
    templates = []
    for each in found:
        spec = each.get("spec", {})
        homes = spec.get("roles", [{"spec": spec}] if "leaderWorkerTemplate" in spec else [])
        templates += [home["spec"]["leaderWorkerTemplate"]["workerTemplate"] for home in homes]
        templates += [spec["template"]] if each["kind"] == "Deployment" else []
    return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"] for each in templates}


def flags(pod: dict[str, Any]) -> dict[str, str]:
    """What the container's command line says."""
    return parse_flags(pod["containers"][0]["args"][1:])


def test_all_rendered_objects_are_valid_for_kubernetes(answers: dict[str, Any]) -> None:
    found = {case: answers["cases"][case] for case in CASES if case not in REFUSED}
    assert {case: said.get("error", said.get("complaints")) for case, said in found.items()} == {
        case: [] for case in found
    }
    assert [message for message in answers["lint"]["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize(("case", "said"), REFUSED.items())
def test_values_that_can_not_work_are_refused_by_name(answers: dict[str, Any], case: str, said: str) -> None:
    assert said in answers["cases"][case]["error"]


@pytest.mark.parametrize("case", ["safe", "open", "emitted", "much", "one set", "sets"])
def test_processes_get_only_flags_that_they_know(answers: dict[str, Any], case: str) -> None:
    found = pods(objects(answers, case))
    assert {"router", "prefill", "decode"} <= set(found)
    for role in ("router", "prefill", "decode"):
        told = flags(found[role])
        model = RouterConfig if role == "router" else NodeConfig
        fields = {flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in told}
        assert fields - {"config"} <= set(model.model_fields)
        told.pop("--config", None)
        given = {flag.removeprefix("--").replace("-", "_"): value for flag, value in told.items()}
        if CASES[case].get(role, {}).get("flags", {}).get("no-enable-prefix-caching"):
            assert given.pop("no_enable_prefix_caching") == "", "a switch has no value"
        config = model.model_validate(
            {**given, "node_id": "n", "registry": "r"}
            if role != "router"
            else given | {"router_id": "r", "registry": "r"}
        )
        assert config.drain_s < found[role]["terminationGracePeriodSeconds"]
        variables = {each["name"]: each for each in found[role]["containers"][0]["env"]}
        assert ("BATON_INSECURE" in variables) == (CASES[case].get("insecure", False))
        assert "BATON_REGISTRY" in variables
        assert found[role]["enableServiceLinks"] is False


def test_probes_use_the_ports_and_paths_of_the_process(answers: dict[str, Any]) -> None:
    for case, scheme in (("safe", "HTTPS"), ("open", "HTTP")):
        for role in ("router", "prefill", "decode"):
            pod = pods(objects(answers, case))[role]
            (container,) = pod["containers"]
            ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
            port = {"router": "--http-port"}.get(role, "--metrics-port")
            for probe, path in (("livenessProbe", "/livez"), ("readinessProbe", "/readyz"), ("startupProbe", "/livez")):
                asked = container[probe]["httpGet"]
                assert (asked["path"], asked["scheme"], ports[asked["port"]]) == (path, scheme, flags(pod)[port])


def test_devices_are_requested_and_memory_may_be_pinned(answers: dict[str, Any]) -> None:
    found = pods(objects(answers, "much"))
    (prefill,), (decode,) = found["prefill"]["containers"], found["decode"]["containers"]
    assert prefill["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": 2, "rdma/hca": 1}
    assert prefill["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert decode["resources"]["limits"] == {"memory": "8Gi"}
    assert decode["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert flags(found["prefill"])["--kv-cache-memory"] == "42949672960"


def test_each_pod_gets_its_own_private_key_only(answers: dict[str, Any]) -> None:
    found = pods(objects(answers, "safe"))
    for role, name in (("router", "router"), ("prefill", "node"), ("decode", "node")):
        (tls,) = [volume["secret"] for volume in found[role]["volumes"] if volume["name"] == "tls"]
        assert [item["key"] for item in tls["items"]] == ["ca.crt", f"{name}.crt", f"{name}.key"]
    assert "volumes" not in found["redis"]


def test_every_pod_matches_its_service_disruption_budget_and_network_policy(answers: dict[str, Any]) -> None:
    found = objects(answers, "much")
    labels = {
        each["metadata"]["name"].rpartition("-")[2]: each["spec"]["template"]["metadata"]["labels"]
        for each in found
        if each["kind"] == "Deployment"
    }
    for role in ("router", "prefill", "decode"):
        for kind, selector in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
            chosen = one(found, kind, f"-{role}")["spec"][selector]["matchLabels"]
            assert [name for name, own in labels.items() if chosen.items() <= own.items()] == [role]
    for end, role in (("baton", "router"), ("-routers", "router"), ("-redis", "redis"), ("-decode", "decode")):
        chosen = one(found, "Service", end)["spec"]["selector"]
        assert [name for name, own in labels.items() if chosen.items() <= own.items()] == [role]


def test_metrics_are_scraped_once_from_each_process(answers: dict[str, Any]) -> None:
    found = objects(answers, "much")
    (monitor,) = [each["spec"] for each in found if each["kind"] == "ServiceMonitor"]
    chosen = monitor["selector"]["matchLabels"]
    services = [each for each in found if each["kind"] == "Service"]
    watched = [each for each in services if chosen.items() <= each["metadata"]["labels"].items()]
    assert sorted(each["spec"]["selector"]["app.kubernetes.io/component"] for each in watched) == [
        "decode",
        "prefill",
        "router",
    ]
    named = {port["name"] for each in watched for port in each["spec"]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["endpoints"]} <= named
    assert all(endpoint["authorization"]["credentials"]["name"] == "monitor" for endpoint in monitor["endpoints"])


def test_other_pods_reach_public_ports_only(answers: dict[str, Any]) -> None:
    found = objects(answers, "safe")
    (public, operators) = one(found, "NetworkPolicy", "-router")["spec"]["ingress"]
    assert public == {"ports": [{"port": "grpc"}, {"port": "http"}]}
    ours = [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "baton", "app.kubernetes.io/instance": "demo"}}}]
    assert (operators["ports"], operators["from"]) == ([{"port": "operator"}], ours)
    assert one(found, "NetworkPolicy", "-redis")["spec"]["ingress"] == [{"ports": [{"port": "redis"}], "from": ours}]
    (peers, _) = one(found, "NetworkPolicy", "-decode")["spec"]["ingress"]
    assert peers == {"from": ours}


def test_compose_files_follow_the_compose_specification(answers: dict[str, Any]) -> None:
    ours, emitted, wrong = answers["compose"]
    assert (ours, emitted) == ([], [])
    assert len(wrong) == 1
