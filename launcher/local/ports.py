"""The ports on which the processes of a cluster listen: chosen before they start, and kept from other clusters on this
machine."""

import errno
import os
import secrets
import socket
from pathlib import Path
from typing import Self

from runtime.settings.addresses import METRICS_OFF, split_metrics
from runtime.settings.options import SettingsError
from runtime.settings.serve import ServeSettings

_PORT_MIN = 20_000
_DRAWS = 20
_GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
SEARCHED = 100  # ports tried, from the default of `--port` on


class PortInUse(OSError):
    """Another program or cluster uses the port."""

    def __init__(self, port: int) -> None:
        super().__init__(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        self.port = port


class ReservedPorts:
    """The ports of one cluster. A port is unused for some seconds before its process listens there, and again while that
    process is restarted. Until `close`, or the end of this process, no other `ReservedPorts` on this machine can take it."""

    def __init__(self) -> None:
        self._locks: dict[int, socket.socket] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._locks:
            self._locks.popitem()[1].close()

    def take(self, host: str, port: int) -> None:
        """Raises `PortInUse`, or another `OSError` where `host` cannot be listened on."""
        self._lock(port)
        try:
            _listen_once(host, port)
        except OSError as error:
            self._release(port)
            raise PortInUse(port) if error.errno == errno.EADDRINUSE else error from None

    def draw(self, host: str) -> int:
        """Chooses a free port below the range from which the kernel chooses, so that no other program gets it by chance.
        Raises `OSError`."""
        first_given_out = int(_GIVEN_OUT.read_text().split()[0]) if _GIVEN_OUT.exists() else 0
        below = range(_PORT_MIN, first_given_out)
        for draw in range(_DRAWS):
            port = secrets.choice(below) if below and draw < _DRAWS - 1 else _listen_once(host, 0)
            try:
                self.take(host, port)
            except PortInUse:
                continue
            return port
        raise OSError(errno.EADDRINUSE, "no free port was found")

    def take_row(self, host: str, first: int, count: int) -> tuple[int, ...]:
        """Takes all ports from `first` on, or none. Raises as `take`."""
        row = tuple(range(first, first + count))
        for taken, port in enumerate(row):
            try:
                self.take(host, port)
            except OSError:
                for other in row[:taken]:
                    self._release(other)
                raise
        return row

    def _lock(self, port: int) -> None:
        """Locks the port by an abstract socket name. The kernel gives it to one socket of this network namespace, and frees it
        when the process ends."""
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            lock.bind(f"\0crossdock-port-{port}")
        except OSError as error:
            lock.close()
            raise PortInUse(port) if error.errno == errno.EADDRINUSE else error from None
        self._locks[port] = lock

    def _release(self, port: int) -> None:
        self._locks.pop(port).close()


def free_port(host: str) -> int:
    """Returns a port that was free a moment ago. Raises `OSError`."""
    with ReservedPorts() as ports:
        return ports.draw(host)


def check(settings: ServeSettings) -> None:
    """Checks that the requested ports are free now. Raises `SettingsError`."""
    with ReservedPorts() as ports:
        http_ports(settings, ports)
        metrics_addresses(settings, ports)


def http_ports(settings: ServeSettings, ports: ReservedPorts) -> tuple[int, ...]:
    """Takes a port for each gateway: from `--port` on, or free ones for 0. If `--port` is not set and the default is taken, it
    takes the next free ones. Raises `SettingsError`."""
    host, first, count = settings.host, settings.port, settings.gateways
    if first + count > 65_536:
        raise SettingsError(f"--gateways: there are no {count} ports from {first} on")
    try:
        if first == 0:
            return tuple(ports.draw(host) for _ in range(count))
        if "port" in settings.model_fields_set:
            return ports.take_row(host, first, count)
        return _next_row(host, first, count, ports)
    except PortInUse as error:
        raise SettingsError(
            f"--port: {error.port} on {host} is taken by another program; choose another, or 0"
        ) from None
    except socket.gaierror:
        raise SettingsError(f"--host: {host} is not an address of this machine") from None
    except PermissionError:
        raise SettingsError(f"--port: {first} is for programs with more rights; take one over 1023") from None
    except OSError as error:
        raise SettingsError(f"--host: cannot listen on {host}: {error.strerror}") from None


def _next_row(host: str, first: int, count: int, ports: ReservedPorts) -> tuple[int, ...]:
    """Takes the first free row of ports from `first` on. Raises as `ReservedPorts.take`."""
    for start in range(first, first + SEARCHED):
        try:
            return ports.take_row(host, start, count)
        except PortInUse:
            continue
    raise PortInUse(first)


def metrics_addresses(settings: ServeSettings, ports: ReservedPorts) -> list[str]:
    """Returns a metrics address for each process in the order in which they start, and last the launcher's own. A process
    keeps its address when it is restarted. Raises `SettingsError`."""
    processes = 1 + settings.gateways + settings.prefill + settings.decode + settings.mixed + 1
    if settings.metrics == METRICS_OFF:
        return [METRICS_OFF] * processes
    host, first = split_metrics(settings.metrics)
    if first and first + processes - 1 > 65_535:
        raise SettingsError(
            f"--metrics: {processes} processes need as many ports from {first} on, and the last one is 65535"
        )
    try:
        row = ports.take_row(host, first, processes) if first else [ports.draw(host) for _ in range(processes)]
    except PortInUse as error:
        raise SettingsError(
            f"--metrics: {processes} processes need the ports from {first} on, and {error.port} on {host} is taken by another"
            " program; choose another first one, or 0 for free ones"
        ) from None
    except OSError as error:
        raise SettingsError(f"--metrics: cannot listen on {host}: {error.strerror}") from None
    shown = f"[{host}]" if ":" in host else host
    return [f"{shown}:{port}" for port in row]


def _listen_once(host: str, port: int) -> int:
    """Listens once; returns the port, or for 0 the one that the kernel chose."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # Old connections of a program that has ended do not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        probe.listen(1)
        return int(probe.getsockname()[1])
