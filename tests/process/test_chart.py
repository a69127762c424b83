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
from tests.support.kubernetes_server import RULES

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
        "encode": 2,
        "routers": 2,
        "device": "cuda",
        "kv_cache_memory": "40GiB",
        "certs": "/c",
        "api_keys": "/k",
        "model": "/srv/m",
        "registry": "rediss://r",
    }
)
ENCODER = UpConfig.model_validate({"prefill": 2, "insecure": True, "model": "/srv/encoder"}).model_copy(
    update={"decode": 0}
)
SPECIAL: dict[str, Any] = {
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "llm", "app.kubernetes.io/component": "mine"},
    "extraEnv": [{"name": "UCX_TLS", "value": "tcp"}],
    "extraVolumes": [{"name": "cache", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "cache", "mountPath": "/cache"}],
    "initContainers": [{"name": "fetch", "image": "fetcher", "volumeMounts": [{"name": "cache", "mountPath": "/c"}]}],
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "nodeSelector": {"pool": "gpus"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "topologySpreadConstraints": [
        {"maxSkew": 2, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"},
        {
            "maxSkew": 1,
            "topologyKey": "rack",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"team": "llm"}},
        },
    ],
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no protection": ({}, "tls.existingSecret"),
    "no keys": ({"tls": {"existingSecret": "t"}}, "apiKeys.existingSecret"),
    "no registry": ({**OPEN, "redis": {"enabled": False}}, "redis.url"),
    "no place for the model": ({**OPEN, "model": {"volume": {"emptyDir": {}}}}, "model.path"),
    "unknown value": ({**OPEN, "prefil": {}}, "prefil"),
    "an encode node on several hosts": ({**OPEN, "encode": {"hosts": 2}}, "encode.hosts"),
    "no decode node": ({**OPEN, "decode": {"replicas": 0}}, "decode"),
    "decode nodes of an encoder": ({**OPEN, "model": {"generates": False}}, "model.generates"),
    "a flag of nodes for routers": ({**OPEN, "router": {"flags": {"max-num-seqs": 4}}}, "max-num-seqs"),
    "a flag of routers for nodes": ({**OPEN, "decode": {"flags": {"max-queue": 4}}}, "max-queue"),
    "a flag that the chart sets": ({**OPEN, "prefill": {"flags": {"drain-s": 4}}}, "drain-s"),
    "a flag out of its range": ({**OPEN, "decode": {"flags": {"block-size": 0}}}, "block-size"),
    "on that YAML reads as true": ({**OPEN, "decode": {"flags": {"async-scheduling": True}}}, "async-scheduling"),
    "a number as a word": ({**OPEN, "decode": {"flags": {"max-num-seqs": "many"}}}, "max-num-seqs"),
    "a set that can not be scaled": (
        {**OPEN, "nodes": {"kind": "DisaggregatedSet"}, "decode": {"autoscaling": {"kind": "ScaledObject"}}},
        "decode.autoscaling.kind",
    ),
    "a set that routers can not scale": (
        {**OPEN, "nodes": {"kind": "DisaggregatedSet"}, "scaler": {"enabled": True}},
        "scaler.enabled: a DisaggregatedSet can't be scaled",
    ),
    "routers that scale by no planner": (
        {**OPEN, "scaler": {"enabled": True}, "router": {"flags": {"planner": "on"}}},
        "scaler.enabled: router.flags needs max-nodes",
    ),
    "scaled by two": (
        {**OPEN, "scaler": {"enabled": True}, "decode": {"autoscaling": {"kind": "ScaledObject"}}},
        "decode.autoscaling.kind: with scaler.enabled routers change the number of nodes",
    ),
    "fewest above most": (
        {**OPEN, "prefill": {"autoscaling": {"kind": "ScaledObject", "minReplicas": 5}}},
        "prefill.autoscaling.minReplicas",
    ),
    "scaled by nothing": (
        {
            **OPEN,
            "prefill": {
                "autoscaling": {"kind": "ScaledObject", "metrics": {"baton_num_uncomputed_prompt_tokens": None}}
            },
        },
        "prefill.autoscaling.metrics",
    ),
    "a route without a gateway": ({**OPEN, "gateway": {"enabled": True}}, "gateway.parentRefs"),
    "two routes for all hosts": (
        {
            **OPEN,
            "gateway": {"enabled": True, "parentRefs": [{"name": "public"}], "grpcHostnames": ["grpc.example.com"]},
        },
        "gateway.hostnames",
    ),
    "two routes for a host": (
        {
            **OPEN,
            "gateway": {
                "enabled": True,
                "parentRefs": [{"name": "public"}],
                "hostnames": ["a.example.com", "b.example.com"],
                "grpcHostnames": ["b.example.com"],
            },
        },
        "b.example.com is in gateway.hostnames, too",
    ),
    "an ingress without a host": ({**OPEN, "ingress": {"enabled": True}}, "ingress.host"),
    "a URL as a host": ({**OPEN, "ingress": {"enabled": True, "host": "https://llm.example.com"}}, "/ingress/host"),
    "a host with a space": (
        {**OPEN, "gateway": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["llm example.com"]}},
        "/gateway/hostnames/0",
    ),
    "a number in a variable": (
        {**OPEN, "decode": {"extraEnv": [{"name": "A", "value": 1}]}},
        "/decode/extraEnv/0/value",
    ),
    "misspelt limits": ({**OPEN, "router": {"resources": {"limit": {"memory": "1Gi"}}}}, "/router/resources"),
    "memory with a space": ({**OPEN, "sharedMemory": "1 GiB"}, "/sharedMemory"),
    "an interval without a unit": (
        {**OPEN, "serviceMonitor": {"enabled": True, "interval": "15"}},
        "/serviceMonitor/interval",
    ),
    "a budget of words": (
        {**OPEN, "podDisruptionBudget": {"maxUnavailable": "one"}},
        "/podDisruptionBudget/maxUnavailable",
    ),
    "a secret in capitals": (
        {"tls": {"existingSecret": "TLS"}, "apiKeys": {"existingSecret": "k"}},
        "/tls/existingSecret",
    ),
    "ranks with a GPU": (
        {**OPEN, "decode": {"gpus": 1, "flags": {"tp": 2}}},
        "decode.gpus: the ranks of a stage (the flag tp)",
    ),
    "more stages than GPUs": (
        {**OPEN, "decode": {"gpus": 2, "flags": {"pp": "3"}}},
        "decode.gpus: each stage (the flag pp) computes on a GPU of its own",
    ),
    "a cache beyond the limit": (
        {**OPEN, "decode": {"flags": {"tp": 2, "kv-cache-memory": "9GiB"}}},
        "decode.resources.limits.memory: 8832Mi has no room for the KV cache",
    ),
    "a rank of words": ({**OPEN, "nodes": {"rankResources": {"memory": "much"}}}, "/nodes/rankResources/memory"),
    "a long name": ({**OPEN, "nodes": {"kind": "LeaderWorkerSet"}}, "at most 44 characters"),
    "hosts of a Deployment": (
        {**OPEN, "decode": {"hosts": 2}},
        "decode.hosts: a Deployment does not start and stop the pods of a node together",
    ),
    "hosts with stages": (
        {**OPEN, "nodes": {"kind": "LeaderWorkerSet"}, "prefill": {"hosts": 2, "flags": {"pp": 2}}},
        "prefill.hosts: a node on several hosts has one stage on each",
    ),
    "too many hosts": ({**OPEN, "nodes": {"kind": "LeaderWorkerSet"}, "prefill": {"hosts": 65}}, "/prefill/hosts"),
    "a rank among the flags": ({**OPEN, "decode": {"flags": {"host-rank": 1}}}, "host-rank"),
    "a long name of hosts": (
        {**OPEN, "nodes": {"kind": "LeaderWorkerSet"}, "decode": {"hosts": 2}},
        "at most 41 characters",
    ),
}
"""Values that the chart refuses, and what it says."""
CASES: dict[str, dict[str, Any]] = {
    "safe": SAFE,
    "open": OPEN,
    "emitted": yaml.safe_load(helm_files(EMITTED, emitted_processes(EMITTED, None), "lease_s = 9\n")["values.yaml"]),
    "an emitted encoder": yaml.safe_load(helm_files(ENCODER, emitted_processes(ENCODER, None), "")["values.yaml"]),
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
    "scaled by Kubernetes": {
        **OPEN,
        "prefill": {"autoscaling": {"kind": "HorizontalPodAutoscaler"}},
        "decode": {"autoscaling": {"kind": "HorizontalPodAutoscaler", "minReplicas": 2, "maxReplicas": 9}},
    },
    "scaled by KEDA": {
        **OPEN,
        "nodes": {"kind": "LeaderWorkerSet"},
        "prometheus": {"url": "http://prometheus.monitoring:9090"},
        "prefill": {"autoscaling": {"kind": "ScaledObject", "scaleDownSeconds": 60}},
        "decode": {
            "autoscaling": {"kind": "ScaledObject", "metrics": {"baton_kv_cache_usage_perc": 0.5}},
        },
    },
    "Deployment scaled by routers": {
        **OPEN,
        "router": {"flags": {"planner": "on", "max-nodes": 9, "max-encode-nodes": 4}},
        "encode": {"replicas": 1},
        "scaler": {"enabled": True},
        "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/r"}},
    },
    "LeaderWorkerSet scaled by routers": {
        **OPEN,
        "nodes": {"kind": "LeaderWorkerSet"},
        "router": {"flags": {"planner": "advise", "max-nodes": 9, "max-encode-nodes": 4}},
        "encode": {"replicas": 1},
        "scaler": {"enabled": True},
    },
    "open to clients": {
        **SAFE,
        "gateway": {
            "enabled": True,
            "parentRefs": [{"name": "public", "namespace": "gateways", "sectionName": "https"}],
            "hostnames": ["llm.example.com"],
            "grpcHostnames": ["grpc.example.com"],
            "requestTimeout": "0s",
            "annotations": {"a": "b"},
        },
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "tlsSecret": "public-tls",
            "host": "llm.example.com",
            "grpcHost": "grpc.example.com",
            "annotations": {"nginx.ingress.kubernetes.io/proxy-buffering": "off"},
            "grpcAnnotations": {"nginx.ingress.kubernetes.io/backend-protocol": "GRPCS"},
        },
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboard": {"enabled": True},
    },
    "special pods": {
        **OPEN,
        "serviceAccount": {"name": "reader", "annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/r"}},
        **dict.fromkeys(("router", "prefill", "decode"), SPECIAL),
    },
    "names of digits": {
        "tls": {"existingSecret": "1"},
        "apiKeys": {"existingSecret": "2"},
        "serviceAccount": {"name": "3"},
        "redis": {"passwordSecret": "4"},
        "prefill": {"priorityClassName": "5", "runtimeClassName": "6", "resources": None},
        "ingress": {"enabled": True, "host": "llm.example.com", "className": "7", "tlsSecret": "8"},
        "serviceMonitor": {"enabled": True, "keySecret": {"name": "9", "key": "on"}},
    },
    "ranks": {
        **OPEN,
        "prefill": {
            "flags": {"tp": 2, "kv-cache-memory": "7GiB"},
            "resources": {"requests": {"cpu": "500m", "memory": "1.5Gi"}, "limits": {"memory": "8G"}},
        },
        "decode": {
            "flags": {"tp": "4"},
            "resources": {"requests": {"cpu": 2, "hugepages-2Mi": "1Gi"}, "limits": {"cpu": 2.5}},
        },
    },
    "stages on GPUs": {**OPEN, "decode": {"gpus": 2, "flags": {"pp": 2}}},
    "ranks of other costs": {
        **OPEN,
        "nodes": {"kind": "LeaderWorkerSet", "rankResources": {"cpu": "250m", "memory": "1G"}},
        "decode": {"flags": {"tp": 1, "pp": 3}},
    },
    "hosts": {
        **SAFE,
        "nodes": {"kind": "LeaderWorkerSet"},
        "prefill": {"replicas": 2, "hosts": 2, "gpus": 8, "rdma": 1, "flags": {"dtype": "bfloat16"}},
        "decode": {"hosts": 3, "affinity": SPECIAL["affinity"]},
        "serviceMonitor": {"enabled": True},
    },
    "a set of hosts": {
        **OPEN,
        "nodes": {"kind": "DisaggregatedSet"},
        "decode": {"hosts": 2, "affinity": {"podAntiAffinity": {}}},
    },
    "no account": {**OPEN, "serviceAccount": {"create": False}},
    "bare": {**OPEN, "networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False}},
    "a route for HTTP alone": {**OPEN, "gateway": {"enabled": True, "parentRefs": [{"name": "public"}]}},
    "the longest name": {**OPEN, "serviceMonitor": {"enabled": True}},
    **{case: values for case, (values, _) in REFUSED.items()},
}
NAMES = {
    "names of digits": "20261126",
    "the longest name": "r" * 41,
    "a long name": "r" * 39,
    "a long name of hosts": "r" * 36,
}
"""The releases' names in some cases."""
WRONG_ROUTE: dict[str, Any] = {
    "apiVersion": "gateway.networking.k8s.io/v1",
    "kind": "GRPCRoute",
    "metadata": {"name": "r", "labels": {}},
    "spec": {"parentRefs": [{"name": "g"}], "rules": [{"timeouts": {"request": "1s"}}]},
}
"""Only HTTPRoutes have timeouts."""
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
        "cases": [
            {"name": NAMES.get(case, "demo"), "values": values, "versions": VERSIONS} for case, values in CASES.items()
        ],
        "compose": [
            without_name((ROOT / "deploy/compose.yaml").read_text()),
            without_name(composed),
            {"services": {"a": {"imgae": "x"}}},
        ],
        "custom": WRONG_ROUTE,
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
    """The pods' specifications by their pool or component."""
    templates = []
    for each in found:
        spec = each.get("spec", {})
        homes = spec.get("roles", [{"spec": spec}] if "leaderWorkerTemplate" in spec else [])
        templates += [home["spec"]["leaderWorkerTemplate"]["workerTemplate"] for home in homes]
        templates += [spec["template"]] if each["kind"] == "Deployment" else []
    return {chosen_by(each["metadata"]["labels"]): each["spec"] for each in templates}


def chosen_by(labels: dict[str, str]) -> str:
    """The pool of nodes or the component that labels say."""
    return labels.get("baton/pool") or labels["app.kubernetes.io/component"]


def flags(pod: dict[str, Any]) -> dict[str, str]:
    """What the container's command line says."""
    return parse_flags(pod["containers"][0]["args"][1:])


def test_all_rendered_objects_are_valid_for_kubernetes(answers: dict[str, Any]) -> None:
    found = {case: answers["cases"][case] for case in CASES if case not in REFUSED}
    assert {case: said.get("error", said.get("complaints")) for case, said in found.items()} == {
        case: [] for case in found
    }
    assert [message for message in answers["lint"]["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize(("case", "said"), [(case, said) for case, (_, said) in REFUSED.items()])
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


def test_a_node_of_several_ranks_requests_more_cores_and_memory(answers: dict[str, Any]) -> None:
    def resources(case: str, role: str) -> Any:
        return pods(objects(answers, case))[role]["containers"][0]["resources"]

    assert resources("ranks", "prefill") == {
        "requests": {"cpu": "1500m", "memory": "2176Mi"},
        "limits": {"memory": "8270Mi"},  # 8 GB are 7,629.4 MiB
    }
    # What a role does not request or limit, its ranks do not add to.
    assert resources("ranks", "decode") == {
        "requests": {"cpu": "5000m", "hugepages-2Mi": "1Gi", "memory": "6016Mi"},
        "limits": {"cpu": "5500m", "memory": "10112Mi"},
    }
    assert resources("ranks of other costs", "decode") == {
        "requests": {"cpu": "2500m", "memory": "6004Mi"},
        "limits": {"memory": "10100Mi"},
    }
    assert resources("ranks of other costs", "prefill") == resources("open", "prefill")


def group(found: Objects, role: str) -> dict[str, Any]:
    """What a LeaderWorkerSet, alone or in a DisaggregatedSet, says of the pods of a node."""
    specs = [each["spec"] for each in found if each["kind"] == "LeaderWorkerSet"]
    specs += [role["spec"] for each in found if each["kind"] == "DisaggregatedSet" for role in each["spec"]["roles"]]
    name = "baton/pool"
    (spec,) = (
        spec for spec in specs if spec["leaderWorkerTemplate"]["workerTemplate"]["metadata"]["labels"][name] == role
    )
    return {**spec["leaderWorkerTemplate"], "replicas": spec["replicas"]}


@pytest.mark.parametrize(("case", "role", "hosts"), [("hosts", "prefill", 2), ("a set of hosts", "decode", 2)])
def test_the_pods_of_a_node_on_several_hosts_have_the_same_settings(
    answers: dict[str, Any], case: str, role: str, hosts: int
) -> None:
    made = group(objects(answers, case), role)
    assert (made["size"], made["restartPolicy"]) == (hosts, "RecreateGroupOnPodRestart")
    first, other = made["leaderTemplate"]["spec"], made["workerTemplate"]["spec"]
    told, told_others = flags(first), flags(other)
    assert (told.pop("--node-id"), told_others.pop("--node-id")) == ("$(POD_NAME)", "$(LEADER_NAME)")
    assert told == told_others
    port = {port["name"]: port["containerPort"] for port in first["containers"][0]["ports"]}["hosts"]
    assert told["--first-host"] == f"$(LWS_LEADER_ADDRESS):{port}", "the address that the operator gives every pod"
    given = {flag.removeprefix("--").replace("-", "_"): value for flag, value in told.items()}
    read = NodeConfig.model_validate(
        {**given, "node_id": "n", "registry": "r", "first_host": f"demo-0.demo.prod:{port}"}
    )
    assert (read.hosts, read.host_rank, read.first_host_address[1]) == (hosts, 0, port)
    own = [each for each in other["containers"][0]["env"] if each not in first["containers"][0]["env"]]
    assert {each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in own} == {
        "LEADER_NAME": "metadata.annotations['leaderworkerset.sigs.k8s.io/leader-name']",
        "BATON_HOST_RANK": "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']",
    }


def test_a_pod_that_only_computes_for_its_node_is_not_asked_whether_it_serves(answers: dict[str, Any]) -> None:
    found = objects(answers, "hosts")
    probed = {"startupProbe", "livenessProbe", "readinessProbe", "ports"}
    for role in ("prefill", "decode"):
        made = group(found, role)
        (first,), (other,) = (made[name]["spec"]["containers"] for name in ("leaderTemplate", "workerTemplate"))
        assert (probed & set(first), probed & set(other)) == (probed, set())
        # Devices, memory and files are those of every pod.
        for name in ("resources", "securityContext", "volumeMounts", "image"):
            assert first[name] == other[name]
    assert made["replicas"] == 1
    prefill = group(found, "prefill")
    assert prefill["replicas"] == 2
    (other,) = prefill["workerTemplate"]["spec"]["containers"]
    assert other["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": 8, "rdma/hca": 1}
    assert other["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    # Any host is as long needed as the first one drains.
    grace = [prefill[name]["spec"]["terminationGracePeriodSeconds"] for name in ("leaderTemplate", "workerTemplate")]
    assert grace == [45, 45]


def test_pods_of_a_node_go_to_different_machines_unless_told_otherwise(answers: dict[str, Any]) -> None:
    for role in ("prefill", "decode"):
        made = group(objects(answers, "hosts"), role)
        for template in (made["leaderTemplate"], made["workerTemplate"]):
            affinity = template["spec"]["affinity"]
            assert ("nodeAffinity" in affinity) == (role == "decode")
            ((apart,),) = affinity["podAntiAffinity"].values()
            term = apart["podAffinityTerm"]
            assert term["topologyKey"] == "kubernetes.io/hostname"
            assert term["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    own = group(objects(answers, "a set of hosts"), "decode")
    assert own["workerTemplate"]["spec"]["affinity"] == {"podAntiAffinity": {}}


def test_all_pods_of_a_node_are_under_the_policies_of_its_role(answers: dict[str, Any]) -> None:
    found = objects(answers, "hosts")
    made = group(found, "prefill")
    for template in (made["leaderTemplate"], made["workerTemplate"]):
        for kind, selector in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
            chosen = one(found, kind, "-prefill")["spec"][selector]["matchLabels"]
            assert chosen.items() <= template["metadata"]["labels"].items()
    # Hosts of a node reach each other at any port, as nodes do.
    (peers, _) = one(found, "NetworkPolicy", "-prefill")["spec"]["ingress"]
    (ours,) = peers["from"]
    assert ours["podSelector"]["matchLabels"].items() <= made["workerTemplate"]["metadata"]["labels"].items()
    assert "ports" not in peers


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
    for end, role in (("baton", "router"), ("-routers", "router"), ("-redis", "redis"), ("-decode-metrics", "decode")):
        chosen = one(found, "Service", end)["spec"]["selector"]
        assert [name for name, own in labels.items() if chosen.items() <= own.items()] == [role]


def test_metrics_are_scraped_once_from_each_process(answers: dict[str, Any]) -> None:
    found = objects(answers, "much")
    (monitor,) = [each["spec"] for each in found if each["kind"] == "ServiceMonitor"]
    chosen = monitor["selector"]["matchLabels"]
    services = [each for each in found if each["kind"] == "Service"]
    watched = [each for each in services if chosen.items() <= each["metadata"]["labels"].items()]
    assert sorted(chosen_by(each["spec"]["selector"]) for each in watched) == [
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


def test_kubernetes_scales_each_role_by_its_own_metrics(answers: dict[str, Any]) -> None:
    found = objects(answers, "scaled by Kubernetes")
    prefill, decode = (one(found, "HorizontalPodAutoscaler", f"-{role}")["spec"] for role in ("prefill", "decode"))
    assert prefill["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "demo-baton-prefill"}
    assert (prefill["minReplicas"], prefill["maxReplicas"]) == (1, 4)
    assert (decode["minReplicas"], decode["maxReplicas"]) == (2, 9)
    (metric,) = prefill["metrics"]
    assert metric["pods"]["metric"] == {"name": "baton_num_uncomputed_prompt_tokens"}
    targets = {each["pods"]["metric"]["name"]: each["pods"]["target"]["averageValue"] for each in decode["metrics"]}
    assert targets == {"baton_num_requests_running": "48000m", "baton_kv_cache_usage_perc": "700m"}
    # An upgrade would reset a number of replicas that is written here.
    scaled = [each for each in found if each["kind"] == "Deployment" and "replicas" not in each["spec"]]
    assert {each["metadata"]["name"] for each in scaled} == {"demo-baton-prefill", "demo-baton-decode"}


def test_keda_asks_for_the_sum_over_the_pods_of_a_role(answers: dict[str, Any]) -> None:
    found = objects(answers, "scaled by KEDA")
    prefill = one(found, "ScaledObject", "-prefill")["spec"]
    assert prefill["scaleTargetRef"]["kind"] == "LeaderWorkerSet"
    (trigger,) = prefill["triggers"]
    selector = 'namespace="prod", role="prefill", node=~"demo-baton-prefill-.+"'
    assert trigger["metadata"] == {
        "serverAddress": "http://prometheus.monitoring:9090",
        "query": f"sum(baton_num_uncomputed_prompt_tokens{{{selector}}})",
        "threshold": "4096",
    }
    behavior = prefill["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 60
    triggers = one(found, "ScaledObject", "-decode")["spec"]["triggers"]
    assert {each["metadata"]["threshold"] for each in triggers} == {"48", "0.5"}


@pytest.mark.parametrize("kind", ["Deployment", "LeaderWorkerSet"])
def test_routers_alone_get_the_rights_to_scale_and_no_others(answers: dict[str, Any], kind: str) -> None:
    found = objects(answers, f"{kind} scaled by routers")
    account = one(found, "ServiceAccount", "-scaler")
    name = account["metadata"]["name"]
    assert account["metadata"].get("annotations") == one(found, "ServiceAccount", "demo-baton")["metadata"].get(
        "annotations"
    )
    # The server that stands for Kubernetes in the contract of scalers allows nothing else.
    assert one(found, "Role", name)["rules"] == RULES[kind]
    binding = one(found, "RoleBinding", name)
    assert binding["roleRef"]["name"] == name
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": name, "namespace": "prod"}]
    assert {
        role: (pod["serviceAccountName"], pod["automountServiceAccountToken"])
        for role, pod in pods(found).items()
        if role != "redis"
    } == {
        "router": (name, True),
        "prefill": ("demo-baton", False),
        "decode": ("demo-baton", False),
        "encode": ("demo-baton", False),
    }
    workloads = [each for each in found if each["kind"] == kind and each["metadata"]["name"].endswith("code")]
    assert ["replicas" in each["spec"] for each in workloads] == [False, False]
    (router,) = pods(found)["router"]["containers"]
    text = router["args"][router["args"].index("--scaler") + 1]
    plural = f"{kind.lower()}s"
    pools = [f"{role}={plural}/demo-baton-{role}" for role in ("prefill", "decode", "encode")]
    assert text == f"kubernetes:{','.join(pools)}"


def test_nothing_is_scaled_or_exposed_unless_asked_for(answers: dict[str, Any]) -> None:
    optional = {
        *("HorizontalPodAutoscaler", "ScaledObject", "HTTPRoute", "GRPCRoute", "Ingress"),
        *("ServiceMonitor", "PrometheusRule", "Role", "RoleBinding"),
    }
    assert not optional & {each["kind"] for each in objects(answers, "safe")}


def test_routes_and_ingresses_lead_to_the_public_ports_of_the_service(answers: dict[str, Any]) -> None:
    found = objects(answers, "open to clients")
    service = one(found, "Service", "baton")
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    name = service["metadata"]["name"]
    for kind, port, host in (("HTTPRoute", "http", "llm.example.com"), ("GRPCRoute", "grpc", "grpc.example.com")):
        (route,) = [each["spec"] for each in found if each["kind"] == kind]
        assert route["hostnames"] == [host]
        assert route["rules"][0]["backendRefs"] == [{"name": name, "port": ports[port]}]
        (entry,) = [
            each["spec"] for each in found if each["kind"] == "Ingress" and each["spec"]["rules"][0]["host"] == host
        ]
        (path,) = entry["rules"][0]["http"]["paths"]
        assert path["backend"] == {"service": {"name": name, "port": {"name": port}}}
        assert entry["tls"] == [{"hosts": [host], "secretName": "public-tls"}]


def test_a_gateway_gets_no_second_route_for_the_same_hosts(answers: dict[str, Any]) -> None:
    assert "GRPCRoute" not in {each["kind"] for each in objects(answers, "a route for HTTP alone")}


def test_names_of_services_are_short_enough_and_not_those_of_a_leader_worker_set(answers: dict[str, Any]) -> None:
    found = objects(answers, "the longest name")
    services = {each["metadata"]["name"] for each in found if each["kind"] == "Service"}
    assert max(map(len, services)) == 63
    assert not [name for name in services if name.endswith(("-prefill", "-decode"))]


def test_the_rules_and_the_dashboard_of_the_repository_are_in_the_chart(answers: dict[str, Any]) -> None:
    found = objects(answers, "open to clients")
    (rules,) = [each["spec"] for each in found if each["kind"] == "PrometheusRule"]
    assert rules == yaml.safe_load((ROOT / "deploy/monitoring/rules.yml").read_text())
    dashboard = one(found, "ConfigMap", "-dashboard")
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(dashboard["data"]["baton.json"]) == json.loads(
        (ROOT / "deploy/monitoring/dashboard.json").read_text()
    )


def test_the_archive_of_the_chart_has_the_files_behind_its_links(answers: dict[str, Any]) -> None:
    packaged = answers["packaged"]
    for name in ("rules.yml", "dashboard.json"):
        assert packaged[f"baton/monitoring/{name}"] == (ROOT / "deploy/monitoring" / name).read_text()
    assert packaged["baton/README.md"] == (CHART / "README.md").read_text()


def test_the_schema_and_the_values_have_the_same_keys() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    node = schema["definitions"]["nodeRole"]

    def keys(part: dict[str, Any], place: str) -> set[str]:
        part = node if place in (".prefill", ".decode") else part
        if part.get("additionalProperties") is not False:
            return {place}
        return set().union(*(keys(each, f"{place}.{name}") for name, each in part["properties"].items()))

    def given(value: Any, place: str, known: set[str]) -> set[str]:
        if place in known or not isinstance(value, dict):
            return {place}
        return set().union(*(given(each, f"{place}.{name}", known) for name, each in value.items()))

    known = keys(schema, "") - {".global"}  # Helm's own, for charts that contain this one
    assert given(yaml.safe_load((CHART / "values.yaml").read_text()), "", known) == known


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_pods_get_what_the_values_add_to_them(answers: dict[str, Any], role: str) -> None:
    found = objects(answers, "special pods")
    (template,) = [
        each["spec"]["template"]
        for each in found
        if each["kind"] == "Deployment" and each["metadata"]["name"].endswith(f"-{role}")
    ]
    pod = template["spec"]
    (container,) = pod["containers"]
    assert SPECIAL["extraEnv"][0] in container["env"]
    assert SPECIAL["extraVolumes"][0] in pod["volumes"]
    assert SPECIAL["extraVolumeMounts"][0] in container["volumeMounts"]
    for name in ("initContainers", "priorityClassName", "runtimeClassName", "nodeSelector", "tolerations", "affinity"):
        assert pod[name] == SPECIAL[name]
    spread, chosen = pod["topologySpreadConstraints"]
    assert spread["topologyKey"] == "topology.kubernetes.io/zone"
    assert chosen == SPECIAL["topologySpreadConstraints"][1], "a constraint may count pods of several roles"
    labels = template["metadata"]["labels"]
    assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
    assert (labels["team"], chosen_by(labels)) == ("llm", role)
    assert labels["app.kubernetes.io/component"] == ("router" if role == "router" else "node")
    assert template["metadata"]["annotations"]["a"] == "b"
    account = one(found, "ServiceAccount", "reader")
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("reader", False)
    assert "eks.amazonaws.com/role-arn" in account["metadata"]["annotations"]


def test_pods_without_an_account_of_their_own_use_the_default_one(answers: dict[str, Any]) -> None:
    found = objects(answers, "no account")
    assert not [each for each in found if each["kind"] == "ServiceAccount"]
    assert {pod["serviceAccountName"] for role, pod in pods(found).items() if role != "redis"} == {"default"}
    (account,) = [each["metadata"]["name"] for each in objects(answers, "open") if each["kind"] == "ServiceAccount"]
    assert {pod["serviceAccountName"] for role, pod in pods(objects(answers, "open")).items() if role != "redis"} == {
        account
    }


def test_an_unknown_field_of_a_custom_kind_is_detected(answers: dict[str, Any]) -> None:
    (complaint,) = answers["custom"]
    assert "timeouts" in complaint
