"""`scripts/compare_peers`: gaps of running streams while long prompts arrive, crossdock beside other servers on this machine.

One server runs at a time, with the same model in float32, and `crossdock bench isolation` measures each. Servers that are not
installed are left out.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Final

import uvloop
from pydantic import Field
from rich.console import Console

from launcher import reports, tables
from launcher.http.client import answers_ready, new_session
from launcher.load.plot import check, draw_peers
from launcher.local.lifetime import until_interrupted
from launcher.local.ports import free_port
from launcher.models import resolve
from launcher.process import python_command
from proto.errors import CrossdockError
from runtime.process import clock
from runtime.settings.command_line import run_role
from runtime.settings.options import SettingsError
from runtime.settings.types import JsonOption, Panels

READY_S: Final = 900.0  # vLLM compiles for minutes when it starts for the first time
STOP_S: Final = 30.0
LOOK_EVERY_S: Final = 1.0


class PeersSettings(JsonOption):
    """Gaps between tokens while long prompts arrive: crossdock beside vLLM and llama.cpp, one server at a time."""

    panels: ClassVar[Panels] = {
        "Servers": "model vllm llama_server gguf",
        "Measurement": "seconds",
        "Output": "as_json plot",
    }
    model: str = Field("", description="Folder of the model; empty: the embedded default.")
    vllm: str = Field("vllm", description="vLLM's command; it is left out where there is none.")
    llama_server: str = Field(
        "llama-server", description="llama.cpp's server; it is left out where there is none, or without --gguf."
    )
    gguf: str = Field("", description="The model for llama.cpp, in float32.")
    seconds: float = Field(30.0, ge=1.0, le=3600.0, description="Seconds of each of the two measurements of a server.")
    plot: str = Field("", description="File for a picture (.svg, .png or .pdf); needs matplotlib.")


class PeerFailed(CrossdockError):
    """A server did not start, or could not be measured."""


@dataclass(frozen=True)
class Peer:
    name: str
    command: tuple[str, ...]  # empty for crossdock, which the measurement starts itself
    environment: dict[str, str] = field(default_factory=dict)


def find_peers(settings: PeersSettings, folder: str, port: int) -> list[Peer]:
    """Returns crossdock and the other servers that are installed. Raises `SettingsError`."""
    cores = sorted(os.sched_getaffinity(0))
    found = [Peer("crossdock 1P1D", ())]
    if vllm := shutil.which(settings.vllm):
        serve = (vllm, "serve", folder, "--dtype", "float32", "--max-num-seqs", "32", "--no-enable-prefix-caching")
        kept = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
        found.append(Peer("vLLM, colocated", (*serve, "--host", "127.0.0.1", "--port", str(port)), kept))
    elif settings.vllm != "vllm":
        raise SettingsError(f"--vllm: there is no command {settings.vllm}")
    if settings.gguf:
        llama, gguf = shutil.which(settings.llama_server), Path(settings.gguf).expanduser()
        if llama is None:
            raise SettingsError(f"--llama-server: there is no command {settings.llama_server}")
        if not gguf.is_file():
            raise SettingsError(f"--gguf: there is no file {gguf}")
        command = (llama, "-m", str(gguf), "-np", "16", "-c", "32768", "-t", str(len(cores)))
        found.append(Peer("llama.cpp, colocated", (*command, "--host", "127.0.0.1", "--port", str(port))))
    return found


@asynccontextmanager
async def started(peer: Peer, port: int, log: Path, console: Console) -> AsyncIterator[str]:
    """Starts a server and yields its URL once it answers; stops it at the end, with all its processes. Raises `PeerFailed`."""
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *peer.command, stdout=out, stderr=out, env={**os.environ, **peer.environment}, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        with console.status(f"{peer.name} starts, which can take minutes; its log is {log}"):
            await _until_ready(process, url, log)
        yield url
    finally:
        await _stop(process)


async def _until_ready(process: asyncio.subprocess.Process, url: str, log: Path) -> None:
    deadline = clock.now() + READY_S
    async with new_session() as session:
        while not await answers_ready(session, f"{url}/v1/models"):
            if process.returncode is not None or clock.now() > deadline:
                last = await asyncio.to_thread(lambda: log.read_text(errors="replace")[-1500:])
                raise PeerFailed(f"{process.returncode=}; the last lines of its log:\n{last}")
            await asyncio.sleep(LOOK_EVERY_S)


async def _stop(process: asyncio.subprocess.Process) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            continue


async def measure(url: str, settings: PeersSettings) -> dict[str, Any]:
    """Measures a server with `bench isolation`, or crossdock if there is no URL; returns the result. Raises `PeerFailed`."""
    arguments = ["bench", "isolation", "--json", "--seconds", str(settings.seconds)]
    arguments += ["--url", url] if url else [settings.model] if settings.model else []
    process = await asyncio.create_subprocess_exec(
        *python_command("launcher.cli", *arguments), stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
    )
    try:
        out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)  # it then stops the cluster that it has started
            await process.wait()
    if process.returncode:
        raise PeerFailed("it could not be measured")
    return dict(json.loads(out))


async def _run(settings: PeersSettings, console: Console) -> int:
    folder, port = str(resolve.ready(settings.model, "", console).path), free_port("127.0.0.1")
    results: dict[str, Any] = {}
    with TemporaryDirectory(prefix="crossdock-") as logs:
        for peer in find_peers(settings, folder, port):
            console.print(f"[bold]{peer.name}[/bold]")
            if not peer.command:
                results[peer.name] = await measure("", settings)
                continue
            async with started(peer, port, Path(logs) / "peer.log", console) as url:
                results[peer.name] = await measure(url, settings)
    show(results, console)
    reports.write_json(settings, {"servers": results, "seconds": settings.seconds})
    if settings.plot:
        draw_peers(settings.plot, results)
    return 0


def show(results: dict[str, Any], console: Console) -> None:
    gaps = ("alone p50", "alone p99", "beside p50", "beside p99", "longest")
    headings = (*gaps, "TTFT p50, s", "1 / 8 / 16 streams", "prefill")
    table = tables.Table("Gaps of 4 streams, ms, alone and beside long prompts; speeds in tokens/s", "", *headings)
    for name, result in results.items():
        alone, loaded = result["alone"], result["loaded"]
        gaps_ms = (alone["p50_ms"], alone["p99_ms"], loaded["p50_ms"], loaded["p99_ms"], loaded["max_ms"])
        speeds = " / ".join(f"{rate:.0f}" for rate in result["throughput"].values())
        ttft, prefill = f"{result['long_prompts']['ttft_p50_s']:.1f}", f"{result['prefill']['tokens_per_s']:.0f}"
        table.row(name, *(f"{gap:.0f}" for gap in gaps_ms), ttft, speeds, prefill)
    table.show(console)


def run(settings: PeersSettings) -> int:
    check(settings.plot)
    console = reports.console_for(settings)
    return uvloop.run(until_interrupted(_run(settings, console), console))


def main() -> int:
    return run_role("benchmarks.peers", PeersSettings, run)


if __name__ == "__main__":
    sys.exit(main())
