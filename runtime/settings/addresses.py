"""Addresses in settings: addresses of sockets in ZeroMQ's form, addresses that others are told, and host names in HTTP
requests."""

import ipaddress
import re
from typing import Annotated
from urllib.parse import parse_qs, urlsplit

from pydantic import AfterValidator

_ADDRESS = re.compile(r"^tcp://(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.*_-]+):(?P<port>\d{1,5})\Z")
_AUTHORITY = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{0,5}))?")
EVERY_INTERFACE = ("*", "0.0.0.0", "[::]")
METRICS_OFF = "off"


def host_of(address: str) -> str:
    """The host of an address that has been checked; empty otherwise."""
    match = _ADDRESS.match(address)
    return match["host"] if match is not None else ""


def split_authority(value: str) -> tuple[str, str] | None:
    """(host, port) of a Host header: the host in lower case, without brackets and without the dot of the root; the port may be
    empty. None for a value that is no authority."""
    match = _AUTHORITY.fullmatch(value)
    if match is None:
        return None
    return match["host"].strip("[]").lower().removesuffix("."), match["port"] or ""


def is_local_name(host: str) -> bool:
    """Returns whether this host of a Host header is an address or localhost, so that no name server decides what it means. Any
    other name could be rebound to this machine (DNS rebinding), and its owner could then send requests from the browser of a
    user of this machine."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def in_url(host: str) -> str:
    """An IPv6 address in brackets, any other host as it is."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def advertised(asked: str, bound: str) -> str:
    """The address that others are told to connect to: the one that was asked for, with the bound port where it names none."""
    if not asked:
        return bound
    host, _, port = asked.rpartition(":")
    return asked if port != "0" else f"{host}:{bound.rpartition(':')[2]}"


def split_metrics(value: str) -> tuple[str, int]:
    """Host, without brackets, and port of an address that has been checked."""
    host, _, port = value.rpartition(":")
    return host.strip("[]"), int(port)


def advertised_metrics(host: str, port: int, advertise: str, hostname: str) -> str:
    """HOST:PORT at which others find a metrics port that is bound so: on every interface, the host they know us by."""
    if host in ("0.0.0.0", "::"):
        host = host_of(advertise) or host_of(f"tcp://{advertise}:0") or host_of(f"tcp://{advertise}") or hostname
    return f"{in_url(host)}:{port}"


def _check_metrics(value: str) -> str:
    """The address in full: a port alone is on loopback."""
    if value == METRICS_OFF:
        return value
    full = f"127.0.0.1:{value}" if value.isascii() and value.isdigit() else value
    if not host_of(f"tcp://{full}") or "*" in full:
        raise ValueError("is not a port, nor an address like 127.0.0.1:9400, nor 'off'")
    _check_address(f"tcp://{full}")
    return full


def _check_address(value: str) -> str:
    match = _ADDRESS.match(value)
    if match is None or int(match["port"]) > 65535:
        raise ValueError("is not an address like tcp://127.0.0.1:7070")
    return value


def _check_advertised(value: str) -> str:
    """The address in full: a host alone stands for port 0 there."""
    if not value:
        return value
    full = value if value.startswith("tcp://") else f"tcp://{value}"
    for address in (full, f"{full}:0"):
        if host_of(address) not in ("", *EVERY_INTERFACE):
            return _check_address(address)
    raise ValueError("is not an address that others can connect to, like 10.0.0.5 or tcp://10.0.0.5:7070")


def check_database(option: str, url: str) -> None:
    """Raises `ValueError`, whose text does not show the URL, since that may have a password."""
    parts = urlsplit(url)
    if parts.scheme not in ("postgresql", "postgres") or not parts.path.strip("/"):
        raise ValueError(f"{option}: is not a URL like postgresql://USER@HOST/NAME")
    if parts.password or any("password" in name for name in parse_qs(parts.query, keep_blank_values=True)):
        raise ValueError(
            f"{option}: has a password, which ps and logs would show; give it as PGPASSWORD in the environment, or in the file"
            " of ?passfile=FILE"
        )


def _check_addresses(value: str) -> str:
    return ",".join(_check_address(one.strip()) for one in value.split(","))


Address = Annotated[str, AfterValidator(_check_address)]
Addresses = Annotated[str, AfterValidator(_check_addresses)]  # separated by commas
AddressesOrEmpty = Annotated[str, AfterValidator(lambda value: _check_addresses(value) if value else value)]
AdvertisedAddress = Annotated[str, AfterValidator(_check_advertised)]
MetricsAddress = Annotated[str, AfterValidator(_check_metrics)]
