"""Hosts for tests: network namespaces on one bridge, made with `ip`, and taken down whatever happens."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Network:
    """`host(name)` is a namespace with one interface, `eth0`. All see each other and the test, which has an address too."""

    def __init__(self) -> None:
        self._tag = f"cd{os.getpid() % 100_000}"
        self._subnet = f"10.213.{os.getpid() % 250 + 1}"
        self._hosts: dict[str, int] = {}

    def open(self) -> None:
        """Skips the test where that is not permitted."""
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self.address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            self.close()
            said = (
                error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else "there is no ip command"
            )
            pytest.skip(f"network namespaces cannot be made here: {said}")

    def host(self, name: str) -> str:
        """Makes one; returns its address."""
        number = self._hosts[name] = len(self._hosts) + 1
        space, outside = self._space(name), self._outside(name)
        _ip("netns", "add", space)
        _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", outside, "master", self._bridge, "up")
        _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", space, "addr", "add", f"{self._subnet}.{number}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        return f"{self._subnet}.{number}"

    def inside(self, name: str) -> list[str]:
        """What to put before a command that is to run there."""
        return ["ip", "netns", "exec", self._space(name)]

    def namespace(self, name: str) -> str:
        return f"/run/netns/{self._space(name)}"

    @property
    def address(self) -> str:
        """The test's own."""
        return f"{self._subnet}.254"

    def cut(self, name: str) -> None:
        """Nothing reaches it and nothing leaves it, and nobody is told."""
        _ip("link", "set", self._outside(name), "nomaster")

    def set_interface(self, name: str, state: str) -> None:
        """Sets a host's own interface "up" or "down"."""
        _ip("-n", self._space(name), "link", "set", "eth0", state)

    def heal(self, name: str) -> None:
        _ip("link", "set", self._outside(name), "master", self._bridge)

    def listening(self, name: str) -> set[str]:
        """Addresses that processes there listen on."""
        text = subprocess.run(
            [*self.inside(name), "cat", "/proc/net/tcp"], capture_output=True, text=True, check=True, timeout=20
        ).stdout
        rows = [line.split() for line in text.splitlines()[1:]]
        found = [row[1].partition(":")[0] for row in rows if row[3] == "0A"]
        return {".".join(str(byte) for byte in reversed(bytes.fromhex(address))) for address in found}

    def close(self) -> None:
        for name in self._hosts:
            subprocess.run(["ip", "netns", "del", self._space(name)], capture_output=True, check=False, timeout=20)
            subprocess.run(["ip", "link", "del", self._outside(name)], capture_output=True, check=False, timeout=20)
        if self._exists:
            subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False, timeout=20)

    @property
    def _exists(self) -> bool:
        return os.path.exists(f"/sys/class/net/{self._bridge}")

    @property
    def _bridge(self) -> str:
        return f"{self._tag}-br"

    def _space(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _outside(self, name: str) -> str:
        return f"{self._tag}v{self._hosts[name]}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True, timeout=20)


@contextmanager
def network() -> Iterator[Network]:
    made = Network()
    try:
        made.open()
        yield made
    finally:
        made.close()


@contextmanager
def loopback_only() -> Iterator[list[str]]:
    """What to put before commands that are to run in a namespace with a loopback interface, and nothing else. Skips the test
    where that is not permitted."""
    name = f"cd{os.getpid() % 100_000}-lo"
    try:
        _ip("netns", "add", name)
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("network namespaces cannot be made here")
    try:
        _ip("-n", name, "link", "set", "lo", "up")
        yield ["ip", "netns", "exec", name]
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=20)
