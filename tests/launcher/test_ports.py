"""Ports of a cluster: free, the cluster's own until it has stopped, and those that were asked for."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.local import ports as module
from launcher.local.ports import PortInUse, ReservedPorts, free_port, http_ports
from runtime.settings.options import SettingsError
from runtime.settings.serve import ServeSettings
from tests.launcher.built import build

HOST = "127.0.0.1"


@contextmanager
def listening(port: int = 0) -> Iterator[int]:
    """Another program."""
    with socket.socket() as other:
        other.bind((HOST, port))
        other.listen(1)
        yield other.getsockname()[1]


def test_taken_port_names_the_option() -> None:
    """A taken HTTP port is refused with --port."""
    with listening() as port, pytest.raises(SettingsError, match=f"--port: {port} on 127.0.0.1 is taken"):
        build(ServeSettings(port=port))


def test_taken_metrics_port_is_named() -> None:
    """A taken port in the metrics range is refused with --metrics and that port."""
    first = free_port(HOST)
    with (
        listening(first + 2),
        pytest.raises(SettingsError, match=rf"--metrics: 5 .* from {first} on, and {first + 2} on"),
    ):
        build(ServeSettings(port=0, metrics=f"{HOST}:{first}"))


@pytest.mark.parametrize("host", ["not a host", "192.0.2.1"])
def test_foreign_host_names_the_option(host: str) -> None:
    """A host that is not an address of this machine is refused with its option."""
    with pytest.raises(SettingsError, match="--host: "):
        build(ServeSettings(host=host, port=0))
    with pytest.raises(SettingsError, match="--metrics: cannot listen on"):
        build(ServeSettings(port=0, metrics="192.0.2.1:0"))


def test_drawn_ports_avoid_ephemeral_range() -> None:
    """Drawn ports are below the range that the kernel gives to other programs."""
    given_out = [int(bound) for bound in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()]
    if given_out[0] <= 20_000:
        pytest.skip("this machine gives out nearly all ports")
    drawn = {free_port(HOST) for _ in range(10)}
    assert len(drawn) > 1
    assert all(1024 <= port < given_out[0] for port in drawn)


def test_no_port_is_drawn_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two reservations never draw the same port."""
    first = free_port(HOST)
    monkeypatch.setattr(module.secrets, "choice", lambda _ports: first)  # type: ignore[attr-defined]
    with ReservedPorts() as ours, ReservedPorts() as theirs:
        drawn = [ours.draw(HOST), ours.draw(HOST), theirs.draw(HOST)]
        assert drawn[0] == first and len(set(drawn)) == 3


def test_port_stays_reserved_until_close() -> None:
    """A reserved port is refused to other processes until the reservation ends."""
    port = free_port(HOST)
    code = f"from launcher.local.ports import ReservedPorts; ReservedPorts().take({HOST!r}, {port})"
    other = [sys.executable, "-c", code]
    with ReservedPorts() as ports:
        ports.take(HOST, port)
        with listening(port):  # its own process still can
            pass
        done = subprocess.run(other, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1 and "PortInUse" in done.stderr
    assert subprocess.run(other, timeout=60, check=False).returncode == 0


def test_next_free_ports_replace_the_default() -> None:
    """The next free row of ports is taken if the default port is not free."""
    first = free_port(HOST)

    def left_open(gateways: int) -> ServeSettings:
        """As if `first` were the default of `--port`."""
        return ServeSettings.model_construct(_fields_set=set(), port=first, gateways=gateways)

    with listening(first + 1), ReservedPorts() as ours, ReservedPorts() as theirs:
        assert http_ports(left_open(2), ours) == (first + 2, first + 3)
        assert http_ports(left_open(1), theirs) == (first,), "a row that was not taken whole is free again"
        with pytest.raises(PortInUse):
            theirs.take(HOST, first + 2)
        with pytest.raises(SettingsError, match=f"--port: {first} "):
            http_ports(ServeSettings(port=first), ours)
    with listening(first):
        (note,) = [one for one in build(left_open(1)).notes if "port" in one]
        assert note.startswith(f"port {first} is taken by another program; serving on {first + 1}")
