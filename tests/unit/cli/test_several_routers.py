"""Several routers of one cluster: their command lines and ports, and their addresses for operators and clients."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from baton.cli.cluster.state import ClusterState, ProcessState
from baton.cli.cluster.supervisor.plan import plan_nodes
from baton.cli.views.cluster_view import combine
from baton.config import UpConfig
from baton.messages.operator import ClusterStatus


def up(routers: int, port: int) -> UpConfig:
    return UpConfig.model_validate({"routers": routers, "grpc_port": port})


def flag(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


@pytest.mark.parametrize(("port", "ports"), [(50051, ["50051", "50052", "50053"]), (0, ["0", "0", "0"])])
def test_each_router_has_a_name_and_a_port(port: int, ports: list[str]) -> None:
    children = plan_nodes(up(3, port), "redis://r", 2, None)
    routers = [child for child in children if child.role == "router"]
    assert [child.name for child in routers] == ["router-0", "router-1", "router-2"]
    assert [flag(list(child.command), "--router-id") for child in routers] == ["router-0", "router-1", "router-2"]
    assert [flag(list(child.command), "--grpc-port") for child in routers] == ports


def test_there_must_be_a_port_for_each_router() -> None:
    assert up(2, 65534).routers == 2
    with pytest.raises(ValidationError, match="leaves no ports for 2 routers"):
        up(2, 65535)


def router(name: str, address: str) -> ProcessState:
    return ProcessState(name, "router", "Ready", 9, 0, 0, f"{name}.a", address, address and f"op-{address}", "log", "")


def test_a_router_that_does_not_run_is_left_out_and_reported() -> None:
    routers = (router("router-0", ""), router("router-1", "h:2"))
    state = ClusterState("c", "ready", 1, 0, 0.0, "m", "auto", "", "", routers)
    assert (state.grpc_addresses, state.operator_addresses) == (("h:2",), ("op-h:2",))
    answer = ClusterStatus("c", "ok", "", [])
    view = combine(answer, "router-0 does not answer", replace(state, processes=()))
    assert (view.health, view.detail) == ("degraded", "router-0 does not answer")
    assert combine(answer, "", replace(state, processes=())).health == "ok"
