"""One contract for all scalers and for their fake; and what each makes of a supervisor that errs."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.errors import ConfigError
from router.scalers.choice import scaler_of
from router.scalers.scaler import PoolSize, Scaler, ScalerFailed, ScalerFault
from tests.support.kubernetes_server import COST
from tests.support.scaled_sites import (
    Site,
    command_site,
    kubernetes_site,
    local_site,
    site_of,
    slurm_site,
    systemd_site,
)

KINDS = ("fake", "Deployment", "LeaderWorkerSet", "slurm", "systemd", "command", "local")
ROOT = Path(__file__).parents[2]
LOWEST = "-2147483648"


@pytest.fixture(params=KINDS)
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    async with site_of(request.param, tmp_path) as site:
        yield site


async def sizes(scaler: Scaler) -> dict[str, tuple[int, int]]:
    return {pool: (size.want, size.have) for pool, size in (await scaler.observe()).items()}


async def fault_of(call: object) -> ScalerFailed:
    with pytest.raises(ScalerFailed) as raised:
        await call  # type: ignore[misc]
    return raised.value


async def test_a_pool_grows_to_a_number_once_however_often_it_is_told(site: Site) -> None:
    assert await sizes(site.scaler) == {"prefill": (1, 1), "decode": (2, 2), "encode": (1, 1)}
    for pool, nodes in (("decode", 4), ("encode", 2)):
        await site.scaler.scale(pool, nodes)
        await site.scaler.scale(pool, nodes)
    await site.settle()
    assert await sizes(site.scaler) == {"prefill": (1, 1), "decode": (4, 4), "encode": (2, 2)}
    assert (len(site.nodes("decode")), len(site.nodes("encode"))) == (4, 2)


async def test_exactly_the_named_node_goes_and_a_second_call_takes_no_other(site: Site) -> None:
    first, second = site.nodes("decode")
    goes = (await site.scaler.observe())["decode"].next_out or first
    await site.scaler.remove(goes)
    await site.scaler.remove(goes)
    await site.settle()
    assert await sizes(site.scaler) == {"prefill": (1, 1), "decode": (1, 1), "encode": (1, 1)}
    assert site.nodes("decode") == [second if goes == first else first]


async def test_what_would_stop_a_node_that_was_not_named_changes_nothing(site: Site) -> None:
    before = site.nodes("decode"), site.nodes("prefill")
    fewer = await fault_of(site.scaler.scale("decode", 1))
    assert (fewer.fault, fewer.subject) == (ScalerFault.REFUSED, "pool decode")
    assert (await fault_of(site.scaler.scale("decode", 5000))).fault is ScalerFault.REFUSED
    other = await fault_of(site.scaler.scale("other", 3))
    assert (other.fault, other.subject) == (ScalerFault.UNKNOWN_POOL, "pool other")
    unknown = await fault_of(site.scaler.remove("decode-77"))
    assert (unknown.fault, unknown.subject) == (ScalerFault.UNKNOWN_NODE, "node decode-77")
    await site.settle()
    assert (site.nodes("decode"), site.nodes("prefill")) == before


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ((401, b'{"message": "who?"}'), ScalerFault.DENIED),
        ((403, b'{"message": "no"}'), ScalerFault.DENIED),
        ((404, b"{}"), ScalerFault.UNKNOWN_POOL),
        ((409, b"[]"), ScalerFault.CONFLICT),
        ((500, b"\xff"), ScalerFault.FAILED),
        ((200, b"no JSON"), ScalerFault.INVALID_ANSWER),
        ((200, b'{"metadata": {"name": "x", "resourceVersion": "1"}, "spec": {"replicas": -1}, "status": {}}'),
         ScalerFault.INVALID_ANSWER),
        ((200, b" " * (17 << 20)), ScalerFault.INVALID_ANSWER),
    ],
    ids=["who", "forbidden", "gone", "changed", "broken", "no-json", "nonsense", "endless"],
)  # fmt: skip
async def test_errors_of_kubernetes_name_the_pool(
    tmp_path: Path, answer: tuple[int, bytes], fault: ScalerFault
) -> None:
    async with kubernetes_site(tmp_path, "Deployment") as site:
        site.api.answer = answer
        for call in (site.scaler.observe(), site.scaler.scale("prefill", 2)):
            failed = await fault_of(call)
            assert (failed.fault, failed.subject) == (fault, "pool prefill")
        assert site.api.changes == []


async def test_a_kubernetes_that_hangs_or_is_gone_or_gave_no_token(tmp_path: Path) -> None:
    async with kubernetes_site(tmp_path, "Deployment", limit_s=0.2) as site:
        site.api.hangs = True
        failed = await fault_of(site.scaler.observe())
        assert (failed.fault, failed.retryable) == (ScalerFault.TIMEOUT, True)
        site.api.hangs = False
        (tmp_path / "token").unlink()
        assert (await fault_of(site.scaler.observe())).fault is ScalerFault.DENIED
        (tmp_path / "token").write_text("t")
    assert (await fault_of(site.scaler.observe())).fault is ScalerFault.UNREACHABLE


async def test_a_pod_is_removed_only_while_no_other_might_be_stopped_for_it(tmp_path: Path) -> None:
    async with kubernetes_site(tmp_path, "Deployment") as site:
        first, second = [pod for pod in site.api.pods if pod.pool == "demo-baton-decode"]
        for part, value in (("ready", False), ("version", "v2")):
            before = getattr(second, part)
            setattr(second, part, value)
            assert (await fault_of(site.scaler.remove(first.name))).fault is ScalerFault.CONFLICT
            setattr(second, part, before)
        # One that is on its way counts until it is gone.
        await site.scaler.remove(first.name)
        assert (await fault_of(site.scaler.remove(second.name))).fault is ScalerFault.CONFLICT
        site.api.settle()
        assert site.nodes("decode") == [second.name]


async def test_the_mark_of_a_removal_that_was_given_up_is_taken_back(tmp_path: Path) -> None:
    async with kubernetes_site(tmp_path, "Deployment") as site:
        first, second = [pod for pod in site.api.pods if pod.pool == "demo-baton-decode"]
        first.annotations[COST] = LOWEST
        await site.scaler.remove(second.name)
        assert (first.annotations, second.annotations) == ({}, {COST: LOWEST})


async def test_a_leader_worker_set_loses_its_last_group_alone(tmp_path: Path) -> None:
    async with kubernetes_site(tmp_path, "LeaderWorkerSet") as site:
        first, last = site.nodes("decode")
        assert (await site.scaler.observe())["decode"] == PoolSize(2, 2, last)
        failed = await fault_of(site.scaler.remove(first))
        assert (failed.fault, last in failed.detail) == (ScalerFault.REFUSED, True)
        assert site.api.changes == []


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("echo 'not JSON'", ScalerFault.INVALID_ANSWER),
        ("echo '{}'", ScalerFault.INVALID_ANSWER),
        ("""echo '{"pools": {"decode": {"want": -1, "have": 0}}}'""", ScalerFault.INVALID_ANSWER),
        ("""echo '{"pools": {"decode": {"want": 99999, "have": 0}}}'""", ScalerFault.INVALID_ANSWER),
        ("""echo '{"pools": {"de code": {"want": 1, "have": 0}}}'""", ScalerFault.INVALID_ANSWER),
        ("head -c 2000000 /dev/zero", ScalerFault.INVALID_ANSWER),
        ("echo 'no quota' >&2; exit 3", ScalerFault.FAILED),
        ("""echo '{"fault": "denied", "error": "ask the owner"}'""", ScalerFault.DENIED),
        ("sleep 60 & sleep 60", ScalerFault.TIMEOUT),
        ("[[ -z ${BATON_REGISTRY:-} ]] || exit 0; exit 4", ScalerFault.FAILED),
    ],
    ids=["text", "empty", "negative", "many", "name", "endless", "exit", "denied", "hangs", "environment"],
)
async def test_a_command_that_errs(tmp_path: Path, program: str, fault: ScalerFault) -> None:
    script = tmp_path / "command"
    script.write_text(f"#!/usr/bin/env bash\n{program}\n")
    script.chmod(0o700)
    limit_s = 0.3 if fault is ScalerFault.TIMEOUT else 30.0
    environ = {"PATH": "/usr/bin:/bin", "BATON_REGISTRY": "redis://:secret@r"}
    scaler = scaler_of(f"command:{script}", "c", environ, limit_s=limit_s)
    failed = await fault_of(scaler.scale("decode", 3))
    assert (failed.fault, failed.subject) == (fault, "all pools")
    assert fault is not ScalerFault.FAILED or "exit code" in failed.detail


async def test_a_program_that_is_missing_is_unreachable(tmp_path: Path) -> None:
    scaler = scaler_of(f"slurm:decode={tmp_path}/s", "c", {"PATH": str(tmp_path)})
    failed = await fault_of(scaler.observe())
    assert (failed.fault, failed.subject) == (ScalerFault.UNREACHABLE, "pool decode")


async def test_a_job_gets_no_secret_and_the_answers_of_slurm_are_checked(tmp_path: Path) -> None:
    site = slurm_site(tmp_path)
    await site.scaler.scale("decode", 3)
    assert (site.state / "exported").read_text() == "--export=BATON_CLUSTER=c,BATON_POOL=decode\n"
    site.put_program("sbatch", "echo 'sbatch: queued, maybe'")
    failed = await fault_of(site.scaler.scale("decode", 9))
    assert (failed.fault, failed.subject) == (ScalerFault.INVALID_ANSWER, "pool decode")
    for line in ("c.decode|N/A|0|RUNNING", "other.decode|1|1|RUNNING", "slurm_load_jobs error"):
        site.put_program("squeue", f"echo '{line}'")
        failed = await fault_of(site.scaler.observe())
        assert (failed.fault, failed.subject) == (ScalerFault.INVALID_ANSWER, "pools prefill, decode, encode")


def test_the_script_for_slurm_names_its_node_as_the_scaler_does(tmp_path: Path) -> None:
    for name, text in {
        "scontrol": "echo NodeName=n1 NodeAddr=10.0.0.7 Port=1",
        "baton": 'echo "$@" $BATON_MODEL',
    }.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o700)
    (tmp_path / "node-decode.env").write_text("BATON_MODEL=/m")
    script = (ROOT / "deploy/slurm/node.sbatch").read_text()
    given = {"BATON_POOL": "decode", "SLURM_ARRAY_JOB_ID": "102", "SLURM_ARRAY_TASK_ID": "3", "SLURMD_NODENAME": "n1"}
    done = subprocess.run(
        ["bash", "-c", script.replace("/opt/baton/bin", str(tmp_path)).replace("/etc/baton", str(tmp_path))],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **given},
        capture_output=True,
        text=True,
        check=True,
    )
    flags = "--role decode --host 10.0.0.7 --drain-s 20 --node-id decode-102-3"
    assert done.stdout == f"node {flags} /m\n"


async def test_systemd_starts_no_more_instances_than_there_are(tmp_path: Path) -> None:
    site = systemd_site(tmp_path)
    before = site.nodes("decode")
    failed = await fault_of(site.scaler.scale("decode", 5))
    assert (failed.fault, failed.subject) == (ScalerFault.REFUSED, "pool decode")
    assert site.nodes("decode") == before
    site.put_program("systemctl", "echo Id=baton-node@decode-0.service; echo ActiveState=active")
    assert (await fault_of(site.scaler.observe())).fault is ScalerFault.INVALID_ANSWER


async def test_a_supervisor_ends_a_removed_node_by_one_signal_and_gives_its_name_to_no_other(tmp_path: Path) -> None:
    async with local_site(tmp_path) as site:
        await site.scaler.remove("decode-1")
        await site.settle()
        await site.scaler.scale("decode", 2)
        await site.settle()
        assert site.nodes("decode") == ["decode-0", "decode-2"]
        assert "decode-1" not in {process.name for process in site.supervisor.state().processes}
        # The cluster ends while the node is about to.
        await site.scaler.remove("decode-2")
    assert (site.signals("decode-1"), site.signals("decode-2")) == (["SIGTERM"], ["SIGTERM"])
    assert (await fault_of(site.scaler.observe())).fault is ScalerFault.UNREACHABLE


async def test_a_supervisor_goes_on_whatever_is_said_at_its_socket(tmp_path: Path) -> None:
    async with local_site(tmp_path) as site:
        path = site.run_dir.path / "control.sock"
        assert path.stat().st_mode & 0o777 == 0o600
        for request in (b"x" * 100_000, b"no JSON\n", b'{"do": "scale", "pool": "decode"}\n', b'{"do": "end"}\n'):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(request)
            answer = await reader.read()
            assert answer == b"" or b'"fault": "refused"' in answer
            writer.close()
        with socket.socket(socket.AF_UNIX) as gone:
            gone.connect(str(path))
        assert await sizes(site.scaler) == {"prefill": (1, 1), "decode": (2, 2), "encode": (1, 1)}


@pytest.mark.parametrize(
    "text",
    [
        *("", "kubernetes", "docker:x", "kubernetes:decode=pods/x", "kubernetes:decode=deployments/x"),
        *("slurm:decode=relative", "slurm:decode=/s,decode=/t", "systemd:decode=0", "systemd:decode=9999999999"),
        *("systemd:de/code=1", "local:relative", "local:", "command:", "command:'"),
        "systemd:" + ",".join(f"p{n}=1" for n in range(17)),
    ],
)
def test_a_text_that_names_no_scaler_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="scaler"):
        scaler_of(text, "c", {}, tmp_path)


def test_a_command_may_have_arguments(tmp_path: Path) -> None:
    assert asyncio.run(sizes(command_site(tmp_path).scaler)) == {"prefill": (1, 1), "decode": (2, 2), "encode": (1, 1)}
