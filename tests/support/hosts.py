"""Several hosts on one machine: network namespaces on a bridge, each with its own address, whose links can be cut.

Needs the right to make namespaces (root, or CAP_SYS_ADMIN and CAP_NET_ADMIN) and the `ip` and `tc` of iproute2.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_NETWORKS = [f"198.{18 + number // 256}.{number % 256}" for number in range(512)]
"""The prefixes of the networks of 198.18.0.0/15, which is for benchmarks (RFC 2544) and which nobody else uses."""


class NotPermitted(Exception):
    """This machine or this user can't make hosts; the message says why."""


class Hosts:
    """The hosts, made by `hosts`. The process that made them has an address on their network, too."""

    def __init__(self, tag: str, names: Sequence[str]) -> None:
        """`tag`: at most 6 characters, different for each set of hosts."""
        self._tag = tag
        self._network = _free_network(tag)
        self._numbers = {name: number for number, name in enumerate(names, start=1)}

    def address(self, name: str) -> str:
        return f"{self._network}.{self._numbers[name]}"

    def namespace(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def command(self, name: str, words: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on this host. The command keeps the process id of `ip`."""
        return ["ip", "netns", "exec", self.namespace(name), *words]

    def down(self, name: str) -> None:
        """Unplug the host."""
        _run("ip", "-n", f"{self._tag}-hub", "link", "set", name, "down")

    def up(self, name: str) -> None:
        _run("ip", "-n", f"{self._tag}-hub", "link", "set", name, "up")

    @contextmanager
    def unplugged(self, name: str) -> Iterator[None]:
        self.down(name)
        try:
            yield
        finally:
            self.up(name)

    @contextmanager
    def blackhole(self, source: str, target: str) -> Iterator[None]:
        """Drop everything that the source sends to the target, without an error."""
        route = ("blackhole", f"{self.address(target)}/32")
        _run("ip", "-n", f"{self._tag}-{source}", "route", "add", *route)
        try:
            yield
        finally:
            _run("ip", "-n", f"{self._tag}-{source}", "route", "del", *route)

    @contextmanager
    def throttled(self, name: str, rate: str) -> Iterator[None]:
        """Limit what the host sends to a rate like 500kbit; fails on exit if the limit was never reached."""
        queue = ("-n", f"{self._tag}-{name}", "qdisc")
        _run("tc", *queue, "add", "dev", "v0", "root", "tbf", "rate", rate, "burst", "16kb", "latency", "2s")
        try:
            yield
            shown = _run("tc", "-s", *queue, "show", "dev", "v0")
            assert int(shown.partition("overlimits ")[2].split()[0]) > 0, shown
        finally:
            _run("tc", *queue, "del", "dev", "v0", "root")

    def make(self) -> None:
        hub = f"{self._tag}-hub"
        _run("ip", "netns", "add", hub)
        _run("ip", "-n", hub, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "br0", "up")
        for name in self._numbers:
            host = f"{self._tag}-{name}"
            _run("ip", "netns", "add", host)
            _run("ip", "link", "add", "v0", "netns", host, "type", "veth", "peer", "name", name, "netns", hub)
            self._plug_in(name, ("-n", host), self.address(name), "v0")
            _run("ip", "-n", host, "link", "set", "lo", "up")
        _run("ip", "link", "add", self._tag, "type", "veth", "peer", "name", "tests", "netns", hub)
        self._plug_in("tests", (), f"{self._network}.254", self._tag)

    def _plug_in(self, port: str, where: Sequence[str], address: str, device: str) -> None:
        _run("ip", "-n", f"{self._tag}-hub", "link", "set", port, "master", "br0", "up")
        _run("ip", *where, "address", "add", f"{address}/24", "dev", device)
        _run("ip", *where, "link", "set", device, "up")

    def remove(self) -> None:
        """Remove the hosts, also those that were made before an error."""
        for name in (*self._numbers, "hub"):
            subprocess.run(["ip", "netns", "del", f"{self._tag}-{name}"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._tag], capture_output=True, check=False)


@contextmanager
def hosts(tag: str, names: Sequence[str]) -> Iterator[Hosts]:
    """Hosts of these names, plugged in; raises NotPermitted."""
    if not (shutil.which("ip") and shutil.which("tc")):
        raise NotPermitted("iproute2 (ip and tc) is not installed")
    made = Hosts(tag, names)
    try:
        try:
            made.make()
        except subprocess.CalledProcessError as error:
            said = error.stderr.strip().splitlines()[:1]
            raise NotPermitted(f"{' '.join(error.cmd)}: {' '.join(said)}") from error
        yield made
    finally:
        made.remove()


def _free_network(tag: str) -> str:
    """A network that no other hosts have, those included that a killed process left behind.

    The tag decides where the search begins, so that processes which search at the same moment find different ones.
    """
    taken = set(re.findall(r"inet (\d+\.\d+\.\d+)\.", _run("ip", "-4", "-oneline", "address", "show")))
    first = zlib.crc32(tag.encode()) % len(_NETWORKS)
    return next(network for network in (*_NETWORKS[first:], *_NETWORKS[:first]) if network not in taken)


def _run(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout
