"""`baton up --emit`: the written files start the processes of `baton up`, as far as parsers can tell."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.cli.cluster.emit import Emission
from baton.cli.cluster.emit.compose import compose_files
from baton.cli.cluster.emit.helm import helm_files
from baton.cli.cluster.emit.processes import EmittedProcess, emitted_processes
from baton.cli.cluster.emit.slurm import slurm_files
from baton.cli.cluster.emit.systemd import systemd_files
from baton.cli.cluster.emit.write import write
from baton.cli.cluster.supervisor.plan import plan_nodes
from baton.config import NodeConfig, RouterConfig, UpConfig, load
from baton.errors import ConfigError, UsageError

ROOT = Path(__file__).parents[3]
REDIS = ("/usr/bin/redis-server", "--unixsocket", "/run/baton/redis.sock", "--save", "")


def up(**settings: object) -> UpConfig:
    return UpConfig.model_validate({"insecure": True, **settings})


def processes(config: UpConfig, cores: int | None = None) -> list[EmittedProcess]:
    return emitted_processes(config, None, cores)


def settings_of_command(words: list[str], environment: Mapping[str, str]) -> NodeConfig | RouterConfig:
    """The settings that `baton node` or `baton router` would read from a command line."""
    command, *rest = words
    flags = {
        flag.removeprefix("--").replace("-", "_"): value for flag, value in zip(rest[::2], rest[1::2], strict=True)
    }
    model: type[NodeConfig | RouterConfig] = NodeConfig if command == "node" else RouterConfig
    assert set(flags) <= set(model.model_fields), set(flags) - set(model.model_fields)
    fallbacks = {"node_id": "n"} if command == "node" else {"router_id": "r"}
    return load(model, flags, environment, None, fallbacks).config


def test_only_what_differs_from_the_defaults_is_written() -> None:
    found = processes(up(prefill=1, decode=1, max_num_seqs=9))
    assert [(p.name, p.role, p.command) for p in found] == [
        ("prefill-0", "prefill", "node"),
        ("decode-0", "decode", "node"),
        ("router-0", "router", "router"),
    ]
    assert [dict(p.flags) for p in found] == [
        {"--max-num-seqs": "9", "--role": "prefill", "--node-id": "prefill-0"},
        {"--max-num-seqs": "9", "--role": "decode", "--node-id": "decode-0"},
        {"--router-id": "router-0"},
    ]
    # Processes of one machine share its cores.
    assert [p.flags.get("--threads") for p in processes(up(), cores=8)] == ["4", "4", None]
    assert [p.flags.get("--threads") for p in processes(up(threads=3))] == ["3", "3", None]


# systemd


def unit(text: str) -> configparser.RawConfigParser:
    parsed = configparser.RawConfigParser(strict=False)
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read_string(text)
    return parsed


NEEDED = {
    "Type": "notify",
    "Restart": "on-failure",
    "KillMode": "mixed",
    "KillSignal": "SIGTERM",
    "TimeoutStopSec": "45",
    "TimeoutStartSec": "infinity",
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "SystemCallFilter": "@system-service",
}


def test_units_start_the_processes_of_baton_up_and_drain_them() -> None:
    config = up(prefill=2, max_num_seqs=9, cluster="blue", grpc_port=7000)
    files = systemd_files(config, processes(config, cores=8), "/opt/b/bin/baton", "me", REDIS)
    target = unit(files["baton-blue.target"])
    assert set(target["Unit"]["Wants"].split()) == set(files) - {"baton-blue.target"}
    for name in ("prefill-0", "prefill-1", "decode-0", "router-0"):
        service = unit(files[f"baton-blue-{name}.service"])["Service"]
        assert {key: service[key] for key in NEEDED} == NEEDED
        assert service["User"] == "me"
        program, *words = shlex.split(service["ExecStart"])
        assert program == "/opt/b/bin/baton"
        read = settings_of_command(words, {"BATON_INSECURE": "true"})
        assert (read.cluster, read.registry) == ("blue", "unix://%t/baton-blue/redis.sock")
        if isinstance(read, NodeConfig):
            assert (read.node_id, read.max_num_seqs, read.threads) == (name, 9, 2)
        else:
            assert read.grpc_port == 7000
    redis = unit(files["baton-blue-redis.service"])["Service"]
    assert redis["RuntimeDirectory"] == "baton-blue"
    assert shlex.split(redis["ExecStart"]) == [REDIS[0], "--unixsocket", "%t/baton-blue/redis.sock", "--save", ""]


def test_the_stop_timeout_is_longer_than_the_drain() -> None:
    config = up(drain_s=600)
    files = systemd_files(config, processes(config), "/b", "me", ())
    assert "baton-redis.service" not in files
    assert unit(files["baton-decode-0.service"])["Service"]["TimeoutStopSec"] == "615"


def test_characters_with_a_meaning_for_systemd_are_escaped(tmp_path: Path) -> None:
    model = tmp_path / 'a "model" of $5 and 100%'
    config = up(model=model)
    text = systemd_files(config, processes(config), "/b", "me", ())["baton-decode-0.service"]
    escaped = str(model).replace('"', r"\"").replace("$", "$$").replace("%", "%%")
    assert f' --model "{escaped}" ' in text


def test_the_units_of_the_repository_equal_the_emitted_ones() -> None:
    config = up()
    emitted = unit(systemd_files(config, processes(config), "/b", "me", ())["baton-decode-0.service"])["Service"]
    differ = {"User", "ExecStart", "Environment", "EnvironmentFile"}
    for name in ("baton-node@.service", "baton-router.service"):
        service = unit((ROOT / "deploy/systemd" / name).read_text())["Service"]
        assert {k: v for k, v in service.items() if k not in differ} == {
            k: v for k, v in emitted.items() if k not in differ
        }
        assert service["User"] == "baton"


@pytest.mark.parametrize("name", ["node-prefill", "node-decode", "node-decode-host-1", "router"])
def test_the_environment_files_of_the_repository_are_valid(name: str) -> None:
    environment: dict[str, str] = {}
    for file in ("baton.env", f"{name}.env"):
        for line in (ROOT / "deploy/systemd" / file).read_text().splitlines():
            if not line.startswith("#"):
                key, mark, value = line.partition("=")
                assert mark
                environment[key] = value
    read = settings_of_command([name.partition("-")[0]], environment)
    assert read.registry == "redis://redis.example:6379"
    assert read.tls is not None
    assert {f"BATON_{field}".upper() for field in type(read).model_fields} >= set(environment) - {"BATON_ROLE"}


def test_the_unit_of_a_host_that_is_not_the_first_leaves_everything_to_its_environment_file() -> None:
    text = (ROOT / "deploy/systemd/stage-host.conf").read_text()
    cleared, command = (line.removeprefix("ExecStart=") for line in text.splitlines() if line.startswith("ExecStart="))
    _, *words = command.split()
    environment = dict(
        line.split("=", 1)
        for name in ("baton", "node-decode-host-1")
        for line in (ROOT / "deploy/systemd" / f"{name}.env").read_text().splitlines()
        if not line.startswith("#")
    )
    read = settings_of_command(words, environment)
    assert isinstance(read, NodeConfig)
    # The name is that of the first host's unit, `--node-id %i.%l`.
    assert (cleared, read.node_id, read.hosts, read.host_rank) == ("", "decode.gpu-1", 2, 1)
    assert read.first_host_address == ("192.0.2.11", 50062)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here (Debian: systemd)")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    config = up(prefill=2)
    units = dict(systemd_files(config, processes(config, cores=4), "/bin/true", "root", ("/bin/true",)))
    for name in ("baton-node@.service", "baton-router.service"):
        text = (ROOT / "deploy/systemd" / name).read_text().replace("/opt/baton/bin/baton", "/bin/true")
        units[name.replace("@", "@prefill")] = text
        units[name.replace("@", "@decode")] = text
    for name, text in units.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "baton-node@decode.service.d").mkdir()
    drop_in = (ROOT / "deploy/systemd/stage-host.conf").read_text().replace("/opt/baton/bin/baton", "/bin/true")
    (tmp_path / "baton-node@decode.service.d/stage-host.conf").write_text(drop_in)
    paths = [str(tmp_path / name) for name in units]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *paths], capture_output=True, text=True, check=False
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if "baton" in line]) == (0, [])
    spoilt = tmp_path / "baton-spoilt.service"
    spoilt.write_text(units["baton-router-0.service"].replace("KillMode=mixed", "KillMode=gently"))
    (tmp_path / "baton-node@decode.service.d/stage-host.conf").write_text(drop_in.replace("exec", "hastily"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", spoilt, tmp_path / "baton-node@decode.service"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "gently" in done.stderr
    assert "hastily" in done.stderr


# compose


def compose(config: UpConfig, settings: str = "") -> dict[str, Any]:
    files = compose_files(config, processes(config), settings)
    parsed: dict[str, Any] = yaml.safe_load(files["compose.yaml"])
    return parsed


def test_a_compose_file_starts_the_processes_of_baton_up() -> None:
    config = up(prefill=2, routers=2, max_num_seqs=9, host="127.0.0.1")
    services = compose(config)["services"]
    assert list(services) == ["redis", "prefill-0", "prefill-1", "decode-0", "router-0", "router-1"]
    for name, service in services.items():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        if name == "redis":
            continue
        assert service["depends_on"] == {"redis": {"condition": "service_healthy"}}
        assert service["stop_grace_period"] == "45s"
        read = settings_of_command(service["command"], service["environment"])
        assert (read.registry, read.host, read.insecure) == ("redis://redis:6379", "0.0.0.0", True)
        if isinstance(read, NodeConfig):
            assert (read.node_id, read.advertise, read.max_num_seqs) == (name, f"{name}:50061", 9)
            assert f":{read.metrics_port}/readyz" in service["healthcheck"]["test"][-1]
        else:
            assert (read.advertise_host, read.grpc_port, read.http_port) == (name, 50051, 8000)
    assert services["router-1"]["ports"] == ["127.0.0.1:50052:50051", "127.0.0.1:8001:8000"]


def test_files_of_this_machine_are_mounted_into_containers(tmp_path: Path) -> None:
    config = UpConfig.model_validate(
        {"model": tmp_path / "m", "certs": tmp_path / "c", "api_keys": tmp_path / "k", "registry": "redis://there"}
    )
    files = compose_files(config, emitted_processes(config, tmp_path / "some.toml"), "lease_s = 9\n")
    assert files["baton.toml"] == "lease_s = 9\n"
    services = yaml.safe_load(files["compose.yaml"])["services"]
    assert "redis" not in services
    service = services["router-0"]
    assert service["volumes"] == [
        f"{tmp_path}/m:/models/m:ro",
        "./baton.toml:/etc/baton/baton.toml:ro",
        f"{tmp_path}/c/router.crt:/etc/baton/tls.crt:ro",
        f"{tmp_path}/c/router.key:/etc/baton/tls.key:ro",
        f"{tmp_path}/c/ca.crt:/etc/baton/ca.crt:ro",
        f"{tmp_path}/k:/etc/baton/keys:ro",
    ]
    flags = dict(zip(service["command"][1::2], service["command"][2::2], strict=True))
    assert flags["--config"] == "/etc/baton/baton.toml"
    del flags["--config"]
    read = settings_of_command(["router", *(word for pair in flags.items() for word in pair)], {})
    assert (read.model, read.tls_key, read.api_keys) == tuple(
        map(Path, ("/models/m", "/etc/baton/tls.key", "/etc/baton/keys"))
    )
    assert "https://localhost:8000/readyz" in service["healthcheck"]["test"][-1]


def test_containers_reserve_gpus() -> None:
    services = compose(up(device="cuda"))["services"]
    devices = services["decode-0"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]
    assert "deploy" not in services["router-0"]
    services = compose(up(device="cuda", decode_pp=4))["services"]
    counts = {
        name: service["deploy"]["resources"]["reservations"]["devices"][0]["count"]
        for name, service in services.items()
        if "deploy" in service
    }
    assert counts == {"prefill-0": 1, "decode-0": 4}


def test_a_pod_has_a_gpu_for_each_stage_of_its_node() -> None:
    config = up(device="cuda", pp=2, decode_pp=4)
    values = yaml.safe_load(helm_files(config, processes(config), "")["values.yaml"])
    assert {role: (values[role]["gpus"], values[role]["flags"]["pp"]) for role in ("prefill", "decode")} == {
        "prefill": (2, "2"),
        "decode": (4, "4"),
    }


def test_a_dollar_is_escaped_in_a_compose_file() -> None:
    config = up(allowed_hosts="a$b", registry="redis://:pa$word@h")
    service = compose(config)["services"]["decode-0"]
    assert "a$$b" in service["command"]
    assert service["environment"]["BATON_REGISTRY"] == "redis://:pa$$word@h"


# secrets


@pytest.mark.parametrize("kind", Emission)
@pytest.mark.parametrize("registry", ["redis://:s3cret@h:1", "rediss://me:s3cret@h", "unix://h/s?password=s3cret"])
def test_a_password_is_in_no_command_line_and_in_no_file_that_others_read(
    tmp_path: Path, kind: Emission, registry: str
) -> None:
    config = up(registry=registry, insecure=True)
    umask = os.umask(0)
    try:
        written = write(kind, config, None, tmp_path)
    finally:
        os.umask(umask)
    assert [stat.S_IMODE(path.stat().st_mode) for path in written] == [0o600] * len(written)
    for path in written:
        lines = [line for line in path.read_text().splitlines() if "s3cret" in line]
        # Passwords may only be where a process reads its environment.
        assert all("BATON_REGISTRY" in line for line in lines), lines
        if kind is Emission.HELM:
            assert not lines
            assert yaml.safe_load(path.read_text())["redis"]["urlSecret"] == {"name": "baton-redis"}
        elif path.suffix == ".service":
            assert not lines
            service = unit(path.read_text())["Service"]
            assert service["EnvironmentFile"] == "/etc/baton/baton.env"
            assert "--registry" not in service["ExecStart"]


def test_a_planned_process_gets_the_registry_in_its_environment() -> None:
    for child in plan_nodes(up(prefill=2, routers=2), "redis://:s3cret@h", 8, None):
        assert not any("s3cret" in word for word in child.command)
        assert child.environment["BATON_REGISTRY"] == "redis://:s3cret@h"
    assert not any("BATON_REGISTRY" in process.environment for process in processes(up()))


# helm and slurm


def test_helm_values_contain_only_what_differs_from_the_chart(tmp_path: Path) -> None:
    config = UpConfig.model_validate(
        {
            "prefill": 3,
            "max_num_seqs": 9,
            "kv_cache_memory": "40GiB",
            "device": "cuda",
            "certs": tmp_path / "c",
            "api_keys": tmp_path / "k",
            "model": tmp_path / "m",
        }
    )
    text = helm_files(config, processes(config), "lease_s = 9\n")["values.yaml"]
    values = yaml.safe_load(text)
    assert values["prefill"] == {
        "replicas": 3,
        "flags": {"device": "cuda", "kv-cache-memory": str(40 << 30), "max-num-seqs": "9"},
        "gpus": 1,
    }
    assert values["router"] == {"replicas": 1}
    assert values["model"] == {"path": "/models/m", "volume": {"hostPath": {"path": str(tmp_path / "m")}}}
    assert values["config"] == "lease_s = 9\n"
    assert "ca.key" not in text
    assert f"--from-file={tmp_path}/c/node.key" in text


def test_a_batch_script_starts_the_same_processes() -> None:
    config = up(
        prefill=2, decode=3, max_num_seqs=9, drain_s=5, grpc_port=7000, registry="redis://:$x@r/0", cluster="blue"
    )
    script = slurm_files(config, processes(config), "/b in/baton")["baton.sbatch"]
    assert not re.search("@[A-Z_]+@", script)
    assert "#SBATCH --ntasks=5\n" in script
    assert "\nnode_flags=(--drain-s 5 --max-num-seqs 9)\n" in script
    assert "\nrouter_flags=(--grpc-port 7000 --http-port 8000 --drain-s 5)\n" in script
    assert "${BATON_REGISTRY:-'redis://:$x@r/0'}" in script
    assert "${BATON_CLUSTER:-blue}" in script
    assert "\nexport BATON_INSECURE=true\n" in script
    assert "${BATON:-'/b in/baton'}" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


_STANDS_FOR_SLURM = """
keep_running() { echo "$@"; }
address_of() { echo "host of $1"; }
srun() {
    local label=
    while [[ $1 == --* ]]; do [[ $1 != --label ]] || label=1 && shift; done
    # As srun does, the tasks of a step answer in any order.
    for ((task = $(sed -n "s/^#SBATCH --ntasks=//p" <<<"$script") - 1; task >= 0; task--)); do
        SLURM_PROCID=$task SLURMD_NODENAME=n$task "$@" | sed "${label:+s/^/$task: /}"
    done
}
export -f address_of keep_running
"""


@pytest.mark.parametrize(
    ("settings", "cores"),
    [
        ({}, None),
        ({"tp": 2}, "2"),
        ({"tp": 2, "prefill_tp": 1, "decode_tp": 4}, "4"),
        ({"prefill_tp": 8}, "8"),
        ({"tp": 2, "decode_pp": 3}, "6"),
        ({"threads": 6, "tp": 2}, "6"),
        ({"threads": 1}, None),
    ],
)
def test_each_task_of_a_job_has_a_core_for_each_thread_or_rank(settings: dict[str, int], cores: str | None) -> None:
    config = up(**settings)
    script = slurm_files(config, processes(config), "baton")["baton.sbatch"]
    found = re.search(r"^#SBATCH --cpus-per-task=(\d+)$", script, re.MULTILINE)
    assert (found and found[1]) == cores
    if cores is not None:
        assert script.index("#SBATCH --ntasks") < script.index("#SBATCH --cpus-per-task") < script.index("set -euo")
    started = script[script.index("\ntasks=(") : script.index(" &\nnodes=")]
    shell = 'srun() { echo "$1 $2 $3"; }; prefill=1 prefill_hosts=1 decode_hosts=1 prefill_flags=() decode_flags=();'
    shell += "baton=b node_flags=();"
    for given, words in (({"SLURM_CPUS_PER_TASK": "4"}, "--cpus-per-task=4"), ({}, "bash")):
        told = subprocess.run(["bash", "-euc", shell + started], env=given, capture_output=True, text=True, check=True)
        assert told.stdout == f"--kill-on-bad-exit=0 --wait=0 {words}\n"


def commands_of_a_job(config: UpConfig) -> list[str]:
    """What the tasks of a job run, in their order."""
    script = slurm_files(config, processes(config), "baton")["baton.sbatch"]
    settings = script[script.index("\nbaton=") : script.index("# Hosts reach")]
    functions = script[script.index("\nnode() {") : script.index("export -f address_of")]
    start = script[script.index("\ntasks=(") : script.index(" &\nnodes=")]
    told = subprocess.run(
        ["bash", "-euc", f"{settings}{functions}export -f node\n{_STANDS_FOR_SLURM}{start}"],
        env={**os.environ, "script": script, "SLURM_JOB_ID": "79"},
        capture_output=True,
        text=True,
        check=True,
    )
    return told.stdout.splitlines()[::-1]


def test_the_nodes_of_a_job_get_the_flags_of_their_role() -> None:
    assert commands_of_a_job(up(prefill=1, decode=2, prefill_tp=1, decode_tp=4, drain_s=5)) == [
        "baton node --drain-s 5 --role prefill --node-id prefill-0 --host host of n0",
        "baton node --drain-s 5 --tp 4 --role decode --node-id decode-0 --host host of n1",
        "baton node --drain-s 5 --tp 4 --role decode --node-id decode-1 --host host of n2",
    ]


def test_the_hosts_of_a_node_are_tasks_of_a_job_that_know_the_first_one() -> None:
    config = up(prefill=2, prefill_hosts=2, decode=2, decode_hosts=3, drain_s=5)
    shown = [
        ("prefill", 0, 0, 2, 0),
        ("prefill", 0, 1, 2, 0),
        ("prefill", 1, 0, 2, 2),
        ("prefill", 1, 1, 2, 2),
        *(("decode", 0, rank, 3, 4) for rank in range(3)),
        *(("decode", 1, rank, 3, 7) for rank in range(3)),
    ]
    ports = {0: 10128, 2: 10129, 4: 10130, 7: 10131}
    assert commands_of_a_job(config) == [
        f"baton node --drain-s 5 --hosts {hosts} --host-rank {rank} --first-host host of n{first}:{ports[first]} "
        f"--role {role} --node-id {role}-{index} --host host of n{task}"
        for task, (role, index, rank, hosts, first) in enumerate(shown)
    ]
    # A node on one host beside it needs no other.
    assert commands_of_a_job(up(decode_hosts=2, drain_s=5)) == [
        "baton node --drain-s 5 --role prefill --node-id prefill-0 --host host of n0",
        *(
            f"baton node --drain-s 5 --hosts 2 --host-rank {rank} --first-host host of n1:10129 --role decode "
            f"--node-id decode-0 --host host of n{1 + rank}"
            for rank in range(2)
        ),
    ]


# all files


def test_nodes_in_containers_find_adapters_where_routers_name_them() -> None:
    config = UpConfig.model_validate({"lora_dir": "/srv/more", "lora_modules": "one=/srv/one", "model": "/m"})
    services = yaml.safe_load(compose_files(config, emitted_processes(config, None), "")["compose.yaml"])["services"]
    assert services["decode-0"]["volumes"] == ["/m:/models/m:ro", "/srv/more:/srv/more:ro", "/srv/one:/srv/one:ro"]
    assert services["router-0"]["volumes"] == ["/m:/models/m:ro"]
    assert "--lora-modules" in services["router-0"]["command"]


def test_every_path_among_the_flags_of_a_container_is_mounted() -> None:
    process = EmittedProcess("decode-0", "decode", "node", {"--failpoints": "/srv/drills", "--device": "/srv"}, {})
    service = yaml.safe_load(compose_files(up(), [process], "")["compose.yaml"])["services"]["decode-0"]
    assert service["volumes"] == ["/srv/drills:/etc/baton/failpoints:ro"]
    command = service["command"]
    assert command[command.index("--failpoints") + 1] == "/etc/baton/failpoints"
    assert command[command.index("--device") + 1] == "/srv"


@pytest.mark.parametrize("kind", list(Emission))
def test_the_paths_of_the_written_files_are_returned(kind: Emission, tmp_path: Path) -> None:
    written = write(kind, up(), None, tmp_path / "out")
    assert sorted(written) == sorted((tmp_path / "out").iterdir())
    assert all(path.read_text() for path in written)


def test_a_model_that_generates_nothing_has_no_decode_nodes(tmp_path: Path) -> None:
    bert = {"model_type": "bert", "architectures": ["BertModel"], "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(bert))
    config = up(model=tmp_path, prefill=1, decode=2)
    composed, *_ = write(Emission.COMPOSE, config, None, tmp_path / "compose")
    services = yaml.safe_load(composed.read_text())["services"]
    assert {"prefill-0", "prefill-1", "prefill-2"} < set(services)
    assert not [name for name in services if name.startswith("decode")]
    values = next(path for path in write(Emission.HELM, config, None, tmp_path / "helm") if "values" in path.name)
    numbers = yaml.safe_load(values.read_text())
    assert (numbers["prefill"]["replicas"], numbers["decode"]["replicas"]) == (3, 0)


@pytest.mark.parametrize("kind", [Emission.COMPOSE, Emission.HELM, Emission.SLURM])
def test_a_cluster_on_a_network_needs_certificates_and_keys(kind: Emission, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--certs DIR and --api-keys FILE"):
        write(kind, UpConfig.model_validate({}), None, tmp_path)
    assert not list(tmp_path.iterdir())
    write(Emission.SYSTEMD, UpConfig.model_validate({}), None, tmp_path)


@pytest.mark.parametrize("kind", [Emission.SYSTEMD, Emission.COMPOSE])
def test_files_for_one_machine_have_no_nodes_on_several(kind: Emission, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"--emit {kind}: the files are for one machine, so leave --prefill-hosts"):
        write(kind, up(decode_hosts=2), None, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("settings", [{"prefill_hosts": 2, "prefill_pp": 2}, {"decode_hosts": 3, "pp": 3, "tp": 2}])
def test_each_host_of_a_node_has_one_stage(settings: dict[str, int]) -> None:
    role = next(name for name in settings if name.endswith("hosts"))
    with pytest.raises(ValueError, match=f"{role} is {settings[role]}, .* has one stage on each"):
        up(**settings)
    up(**settings | {"prefill_pp": 1, "decode_pp": 1})


def test_a_directory_that_can_not_be_written_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="choose another directory with --emit-dir"):
        write(Emission.SLURM, up(), None, tmp_path / "file")


@pytest.mark.parametrize(
    ("kind", "place"), [(Emission.COMPOSE, "compose.yaml"), (Emission.SLURM, "slurm/baton.sbatch")]
)
def test_the_files_of_the_repository_equal_the_emitted_ones(kind: Emission, place: str) -> None:
    """With certificates and keys in their usual directories."""
    config = UpConfig.model_validate({"certs": "/etc/baton/tls", "api_keys": "/etc/baton/keys"})
    if kind is Emission.COMPOSE:
        (text,) = compose_files(config, processes(config), "").values()
    else:
        (text,) = slurm_files(config, processes(config), "/opt/baton/bin/baton").values()
    assert (ROOT / "deploy" / place).read_text() == text


def test_the_chart_knows_all_values_that_are_emitted(tmp_path: Path) -> None:
    """The schema refuses unknown values; tests of the chart compare it with the values of the chart."""
    properties = json.loads((ROOT / "deploy/helm/baton/values.schema.json").read_text())["properties"]
    config = UpConfig.model_validate(
        {"certs": tmp_path, "api_keys": tmp_path, "registry": "redis://r", "model_name": "m"}
    )
    assert set(yaml.safe_load(helm_files(config, processes(config), "x = 1\n")["values.yaml"])) <= set(properties)


def test_helm_values_have_the_hosts_of_each_node() -> None:
    config = up(prefill=2, prefill_hosts=2, decode_hosts=4)
    values = yaml.safe_load(helm_files(config, processes(config), "")["values.yaml"])
    assert (values["prefill"], values["decode"]) == ({"replicas": 2, "hosts": 2}, {"replicas": 1, "hosts": 4})
    assert values["nodes"] == {"kind": "LeaderWorkerSet"}


def test_encode_nodes_are_one_process_each_and_share_the_settings_of_all() -> None:
    config = up(encode=2, tp=2, max_num_seqs=9, metrics_port=9000)
    nodes = [process for process in processes(config, 8) if process.command == "node"]
    assert [(node.name, node.role) for node in nodes] == [
        ("prefill-0", "prefill"),
        ("decode-0", "decode"),
        ("encode-0", "encode"),
        ("encode-1", "encode"),
    ]
    for place, node in enumerate(nodes):
        own = {} if node.role == "encode" else {"--tp": "2"}
        assert node.flags == own | {
            "--role": node.role,
            "--node-id": node.name,
            "--max-num-seqs": "9",
            "--threads": "2",
            "--metrics-port": str(9000 + place),
        }
    values = yaml.safe_load(helm_files(config, processes(config), "")["values.yaml"])
    assert values["encode"] == {"replicas": 2, "flags": {"max-num-seqs": "9"}}
    with pytest.raises(UsageError, match="encode"):
        slurm_files(config, processes(config), "baton")
