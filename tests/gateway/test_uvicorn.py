"""`gateway.http.server` and `runtime.metrics.http` extend classes of uvicorn that are not its public interface: what they
rely on is there."""

import asyncio
import inspect
import tomllib
from importlib.metadata import version
from pathlib import Path

import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway.http.server import _Connection, make_server
from runtime.metrics import http as metrics_http

ROOT = Path(__file__).parents[2]
OVERRIDDEN = {
    "connection_made": ["transport"],
    "connection_lost": ["exc"],
    "pause_writing": [],
    "resume_writing": [],
    "data_received": ["data"],
    "on_headers_complete": [],
    "send_400_response": ["msg"],
    "on_body": ["body"],
    "on_message_complete": [],
}
OVERRIDDEN_FOR_METRICS = (
    "connection_made",
    "connection_lost",
    "data_received",
    "on_headers_complete",
    "send_400_response",
)


async def _app(_scope: object, _receive: object, _send: object) -> None:
    return


def test_overridden_uvicorn_methods_exist() -> None:
    """The methods of uvicorn that are overridden exist with the expected parameters."""
    for name, parameters in OVERRIDDEN.items():
        for cls in (HttpToolsProtocol, _Connection):
            found = list(inspect.signature(getattr(cls, name)).parameters)[1:]
            assert found == parameters, (cls, name)
        assert name in vars(_Connection), "overridden no more: take it out of this list"
    for name in OVERRIDDEN_FOR_METRICS:
        found = list(inspect.signature(getattr(metrics_http._Connection, name)).parameters)[1:]
        assert found == OVERRIDDEN[name] and name in vars(metrics_http._Connection)
    assert inspect.iscoroutinefunction(uvicorn.Server.startup)
    assert list(inspect.signature(uvicorn.Server.startup).parameters) == ["self", "sockets"]
    assert hasattr(uvicorn.Server.capture_signals, "__wrapped__"), "a context manager"


def test_used_uvicorn_attributes_exist() -> None:
    """The attributes of uvicorn that the gateway reads exist."""

    async def body() -> None:
        server = make_server(_app, 5.0, 1)
        server.config.load()
        state = ServerState()
        one = HttpToolsProtocol(server.config, state, {}, asyncio.get_running_loop())
        assert one.connections is state.connections and one.connections == set()
        assert one.loop is asyncio.get_running_loop()
        assert one.cycle is None and len(one.pipeline) == 0
        sent = bytearray()

        class Transport(asyncio.Transport):
            def get_extra_info(self, name: str, default: object = None) -> object:
                return default

            def write(self, data: bytes | bytearray | memoryview) -> None:
                sent.extend(data)

            def is_closing(self) -> bool:
                return False

            def pause_reading(self) -> None:
                return

            def resume_reading(self) -> None:
                return

            def close(self) -> None:
                return

        transport = Transport()
        one.connection_made(transport)
        assert one.transport is transport and callable(one.flow.resume_reading)
        one.data_received(b"GET /x HTTP/1.1\r\nHost: y\r\n\r\n")
        assert one.url == b"/x" and one.headers == [(b"host", b"y")]
        cycle = one.cycle
        assert isinstance(cycle, RequestResponseCycle)
        assert (cycle.response_complete, cycle.disconnected) == (False, False)
        assert isinstance(cycle.message_event, asyncio.Event)
        one.data_received(b"GET /z HTTP/1.1\r\nHost: y\r\n\r\n")
        assert len(one.pipeline) == 1 and one.cycle is not cycle, "the latest request waits for the answer before it"
        await asyncio.sleep(0)
        one.data_received(b"nonsense\r\n\r\n")
        assert b"HTTP/1.1 400 " in sent, "send_400_response is what answers bytes that are not HTTP"

    asyncio.run(body())


def test_uvicorn_range_ends_after_tested_version() -> None:
    """The range of uvicorn in pyproject.toml ends right after the pinned minor version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [Requirement(text) for text in project["dependencies"]]
    (found,) = [one for one in requirements if one.name == "uvicorn"]
    (upper,) = [part.version for part in found.specifier if part.operator == "<"]
    pinned = (ROOT / "constraints.txt").read_text().split("\nuvicorn==")[1].split()[0]
    assert found.specifier.contains(pinned) and found.specifier.contains(version("uvicorn"))
    major, minor = (int(part) for part in pinned.split(".")[:2])
    assert upper == f"{major}.{minor + 1}"
