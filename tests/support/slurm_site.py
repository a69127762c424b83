"""A Slurm installation of one test: a controller and several nodes on this machine, in a directory of its own."""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.free_ports import first_free_port

INSTALL = Path(__file__).parents[2] / "scripts" / "slurm"
_BOUND_S = 100.0
"""The longest wait for a job that serves."""
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
_CONF = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={place}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=30
"""


class NoSlurm(Exception):
    """There is no Slurm here and none can be installed; the message says why."""


class SlurmSite:
    """The commands of the site's users."""

    def __init__(self, place: Path, environment: Mapping[str, str]) -> None:
        self.place = place
        self.environment = {**environment, "SLURM_CONF": str(place / "slurm.conf")}

    def run(self, *words: object, **environment: str) -> str:
        """Run a command of Slurm and return its output; fails if the command does."""
        command = list(map(str, words))
        done = subprocess.run(
            command,
            env={**self.environment, **environment},
            cwd=self.place,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def first_line(self, pipe: Path, job: str) -> str:
        """Read the line that a job writes into a named pipe once it serves. Raises AssertionError with its log."""
        log = self.place / f"baton-{job}.log"
        descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor) as news:
            if select.select([news], [], [], _BOUND_S)[0]:
                os.set_blocking(descriptor, True)
                return news.readline()
        said = log.read_text() if log.exists() else "Slurm has not begun it"
        raise AssertionError(f"job {job} does not serve: {said}\n{self.run('scontrol', 'show', 'job', job)}")

    def wait_for_end(self, job: str) -> None:
        """Return when nothing of the job is left: another job can only run then."""
        self.run("srun", "--quiet", "--nodes=1", "--ntasks=1", f"--dependency=afterany:{job}", "true")


@contextmanager
def slurm_site(place: Path, nodes: int, environment: Mapping[str, str]) -> Iterator[SlurmSite]:
    """Yield a site with this number of nodes, and remove it. Raises NoSlurm."""
    _install()
    place.mkdir()
    first = first_free_port(nodes + 1)
    ports = range(first, first + nodes + 1)
    lines = [
        f"NodeName=n{index} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=4"
        for index, port in enumerate(ports[1:])
    ]
    lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP")
    site = SlurmSite(place, environment)
    with ExitStack() as stack:
        # The paths of sockets in it may have 107 characters: Slurm holds a job for which one has more.
        spool = Path(stack.enter_context(TemporaryDirectory(dir="/tmp")))
        (place / "slurm.conf").write_text(
            _CONF.format(place=place, spool=spool, port=ports[0]) + "\n".join(lines) + "\n"
        )
        controller = stack.enter_context(_daemon(site, "slurmctld", "-c", "-D"))
        _until_it_serves(controller)
        for index in range(nodes):
            (spool / f"n{index}").mkdir()
            stack.enter_context(_daemon(site, "slurmd", "-D", "-N", f"n{index}"))
        yield site


@contextmanager
def _daemon(site: SlurmSite, *words: str) -> Iterator[subprocess.Popen[str]]:
    log = (site.place / f"{words[0]}{words[-1]}.log").open("w")
    output = subprocess.PIPE if words[0] == "slurmctld" else log
    with log, subprocess.Popen(list(words), env=site.environment, stdout=log, stderr=output, text=True) as daemon:
        try:
            yield daemon
        finally:
            daemon.terminate()
            daemon.wait()


def _until_it_serves(controller: subprocess.Popen[str]) -> None:
    assert controller.stderr is not None
    said = []
    for line in controller.stderr:
        said.append(line)
        if "Running as primary controller" in line:
            # A full pipe would stop it.
            threading.Thread(target=controller.stderr.read, daemon=True).start()
            return
    raise AssertionError("".join(said))


def _install() -> None:
    if os.geteuid() != 0:
        raise NoSlurm("Slurm's daemons start jobs as root alone")
    if all(map(shutil.which, _PROGRAMS)):
        return
    done = subprocess.run([INSTALL], capture_output=True, text=True, check=False, timeout=110)
    if not all(map(shutil.which, _PROGRAMS)):
        said = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise NoSlurm(f"no Slurm, and {INSTALL.name} ended with {done.returncode}: {' '.join(said)}")
