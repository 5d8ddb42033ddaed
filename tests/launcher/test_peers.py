"""`scripts/compare_peers`: which servers it measures, how it starts and stops them, and its picture."""

import asyncio
import os
import select
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.peers import Peer, PeerFailed, PeersSettings, find_peers, started
from launcher.load import plot
from launcher.local.ports import free_port
from runtime.settings.options import SettingsError

SERVER = """
import http.server, sys, subprocess
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
class Models(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "2"); self.end_headers(); self.wfile.write(b"{}")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Models).serve_forever()
"""


def test_named_peers_must_be_installed(tmp_path: Path) -> None:
    """Peers that are not installed are left out, but a peer named by an option must exist."""
    assert find_peers(PeersSettings(), "m", 1)[0] == Peer("crossdock 1P1D", ())
    with pytest.raises(SettingsError, match="--vllm"):
        find_peers(PeersSettings(vllm="/no/such/vllm"), "m", 1)
    with pytest.raises(SettingsError, match="--llama-server"):
        find_peers(PeersSettings(llama_server="/no/such/server", gguf="m.gguf"), "m", 1)
    with pytest.raises(SettingsError, match="--gguf"):
        find_peers(PeersSettings(llama_server=sys.executable, gguf=str(tmp_path / "m.gguf")), "m", 1)
    (tmp_path / "m.gguf").touch()
    found = find_peers(PeersSettings(llama_server=sys.executable, gguf=str(tmp_path / "m.gguf")), "m", 8123)
    assert found[-1].name.startswith("llama.cpp") and "8123" in found[-1].command


def test_stopped_server_takes_its_processes(tmp_path: Path) -> None:
    """A peer server is stopped with all the processes that it started."""
    port, log = free_port("127.0.0.1"), tmp_path / "log"

    async def scene() -> int:
        peer = Peer("it", (sys.executable, "-c", SERVER, str(port)))
        async with started(peer, port, log, Console()) as url:
            assert url.endswith(str(port))
            return os.pidfd_open(int(log.read_text().split()[0]))

    child = asyncio.run(scene())
    try:
        assert select.select([child], [], [], 30.0)[0], "the child outlived its server"
    finally:
        os.close(child)


def test_failed_server_start_says_why(tmp_path: Path) -> None:
    """A peer server that ends at its start is reported with its own words."""

    async def scene() -> None:
        peer = Peer("it", (sys.executable, "-c", "raise SystemExit('no such model')"))
        async with started(peer, free_port("127.0.0.1"), tmp_path / "log", Console()):
            pass

    with pytest.raises(PeerFailed, match="no such model"):
        asyncio.run(scene())


def test_peers_plot_is_one_svg(tmp_path: Path) -> None:
    """The plot of several servers is drawn as one SVG."""

    def result(alone: float, loaded: float) -> dict[str, object]:
        return {"alone": {"p99_ms": alone}, "loaded": {"p99_ms": loaded}}

    plot.draw_peers(str(tmp_path / "peers.svg"), {"crossdock 1P1D": result(70.0, 80.0), "other": result(40.0, 2000.0)})
    picture = (tmp_path / "peers.svg").read_text()
    assert picture.count("<svg") == 1 and len(picture) > 5000
