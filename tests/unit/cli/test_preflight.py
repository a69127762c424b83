"""What `baton up` checks before it starts a process: that its ports are free, and that its nodes have C kernels."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from baton.cli.cluster.supervisor.preflight import check_ports, why_slow
from baton.config import UpConfig
from baton.errors import ConfigError
from baton.runner.backends.cpu import kernel_file


@pytest.mark.parametrize(
    ("settings", "is_told"), [({}, True), ({"runner": "simulated"}, False), ({"device": "cuda:1"}, False)]
)
def test_missing_kernels_are_told_where_they_would_be_used(
    settings: dict[str, str], is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = UpConfig.model_validate(settings)
    assert why_slow(config) == ""
    monkeypatch.setattr(kernel_file, "LIBRARY", tmp_path / "libkernels.so")
    said = why_slow(config)
    assert ("install a C compiler" in said and "twelve times as long" in said) is is_told
    assert bool(said) is is_told


@pytest.mark.parametrize("flag", ["--grpc-port", "--http-port", "--metrics-port"])
def test_a_port_of_another_process_is_named_with_its_flag(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        key = flag.removeprefix("--").replace("-", "_")
        config = UpConfig.model_validate({"grpc_port": "0", "http_port": "0", key: str(port)})
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use: choose another with {flag}"):
            check_ports(config)


def test_two_processes_of_a_cluster_may_not_take_one_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        free = other.getsockname()[1]
    ports = {"grpc_port": str(free), "http_port": str(free)}
    with pytest.raises(ConfigError, match=f"--grpc-port and --http-port both need port {free}"):
        check_ports(UpConfig.model_validate(ports))
    check_ports(UpConfig.model_validate({"grpc_port": "0", "http_port": "0", "metrics_port": "0", "routers": "2"}))
