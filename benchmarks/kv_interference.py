"""`python -m benchmarks kv-interference`: how arriving KV affects running streams while no prompt is computed.

A decode worker as `crossdock serve` starts it, and no prefill worker: the KV of one prompt is stored, and sent again and again
by the real sender from a process that computes nothing. This process is the worker's coordinator and gateway. Each arrived
prompt is released at once, so that it (nearly) never joins a step. Rounds take turns in the order alone, beside, beside,
alone, so that a machine that slows down over time affects both kinds.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.remote_peer import Far
from benchmarks.settings import HarmlessSettings
from launcher import reports, tables
from launcher.http.streams import BenchFailed, ClientStream, gaps_between, percentile
from launcher.local import cluster
from launcher.local.core_plan import plan_cpu
from launcher.local.lifetime import new_log_dir, sayer, until_interrupted
from launcher.local.supervisor import Supervisor
from launcher.models import resolve
from launcher.models.resolve import ReadyModel
from proto import limits
from proto.messages import Destination, Finished, Hello, Message, Release, Released, Reserve, Role, Tokens
from proto.progress import DecodeProgress
from proto.sampling import Sampling
from runtime.link.server import LinkServer, Peer
from runtime.process import clock
from runtime.settings.serve import ServeSettings

GOAL = 1.15
_KV_GIB = 0.75
_STREAM_PROMPT_TOKENS = 64
_START_TIMEOUT_S = 180.0
_WARMUP_TRANSFERS = 12  # these transfers go through the whole pool, so that all its pages are mapped


@dataclass
class Transfers:
    """The transfers beside the streams."""

    took_s: list[float] = field(default_factory=list)
    kv_bytes: int = 0
    joined: int = 0  # transfers whose prompts joined one step all the same before they were released


class Bench:
    """The worker's coordinator and gateway."""

    def __init__(self, settings: HarmlessSettings, far: Far) -> None:
        self.settings = settings
        self.far = far
        self.incarnation = clock.new_incarnation()
        self.worker: Peer | None = None
        self.up = asyncio.Event()
        self.streams: dict[str, ClientStream] = {}  # all streams that ever ran, by request
        self.transfers = Transfers()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: dict[str, asyncio.Event] = {}
        self._sent = 0
        self._replaying = asyncio.Lock()
        self.control = self._server(Role.COORDINATOR, self._registered, self._heard)
        self.tokens = self._server(Role.GATEWAY, lambda peer: None, self._tokens)

    def _server(
        self, role: Role, on_up: Callable[[Peer], None], on_message: Callable[[Peer, Message, bytes], None]
    ) -> LinkServer:
        return LinkServer(
            bind="tcp://127.0.0.1:0",
            hello=Hello(limits.PROTOCOL_VERSION, role, self.incarnation, f"bench-{role}"),
            accept=lambda hello: None,
            on_up=on_up,
            on_message=on_message,
            on_down=lambda peer, reason: self._fail(f"{peer.hello.name} left: {reason}"),
        )

    def _fail(self, reason: str) -> None:
        if not self.failure.done():
            self.failure.set_exception(BenchFailed(reason))

    def _registered(self, peer: Peer) -> None:
        self.worker = peer
        self.up.set()

    def _heard(self, _: Peer, message: Message, blob: bytes) -> None:
        if isinstance(message, Finished | Released):
            if message.request_id in self.ended:
                self.ended[message.request_id].set()
        elif not isinstance(message, DecodeProgress):
            self._fail(f"the decode worker says {message}")

    def _tokens(self, _: Peer, message: Message, blob: bytes) -> None:
        now = clock.now()
        assert isinstance(message, Tokens)
        for item in message.items:
            if item.request_id in self.streams:
                self.streams[item.request_id].arrivals += [now] * len(item.tokens)
            else:
                self.transfers.joined += 1

    async def connect(self, tokens_address: str) -> None:
        """Connects once the worker has registered."""
        assert self.worker is not None
        self.gateway = Destination(tokens_address, self.incarnation)
        hello = self.worker.hello
        self.sender_incarnation = await self.far.order(
            "connect", address=hello.address, incarnation=hello.incarnation, transport=self.settings.kv_transport
        )

    async def _hand_over(self, prompt_tokens: int, output_tokens: int, name: str) -> dict[str, Any]:
        """Reserves room for a request and has its KV sent; one request at a time."""
        assert self.worker is not None and self.worker.hello.capacity is not None
        block_size = self.worker.hello.capacity.block_size
        sampling = Sampling(max_tokens=output_tokens, temperature=0.0)
        blocks = -(-(prompt_tokens + output_tokens) // block_size)
        self.worker.send(
            Reserve(name, 1, prompt_tokens, sampling, 1, 0, 0, blocks, self.gateway, self.sender_incarnation)
        )
        async with self._replaying:
            result: dict[str, Any] = await self.far.order(
                "session", request_id=name, blocks=-(-prompt_tokens // block_size)
            )
        return result

    async def _end_of(self, name: str) -> None:
        await self.ended[name].wait()
        del self.ended[name]

    async def stream(self, index: int) -> None:
        """Runs one stream, and starts it again when it ends. The streams are staggered, so that they do not all end at
        once."""
        count, turn = self.settings.streams, 0
        while True:
            name = f"stream-{index}.{turn}"
            length = self.settings.stream_tokens if turn else max(8, self.settings.stream_tokens * (index + 1) // count)
            self.streams[name], self.ended[name] = ClientStream(clock.now()), asyncio.Event()
            await self._hand_over(_STREAM_PROMPT_TOKENS, length, name)
            await self._end_of(name)
            turn += 1

    async def transfer(self) -> None:
        """Transfers one prompt's KV: sends it, waits for the acknowledgement, releases it."""
        assert self.worker is not None
        self._sent += 1
        name = f"prompt-{self._sent}"
        self.ended[name] = asyncio.Event()
        result = await self._hand_over(self.settings.prompt_tokens, 2, name)
        self.worker.send(Release(name, 1))
        self.transfers.took_s.append(result["took_s"])
        self.transfers.kv_bytes += result["kv_bytes"]
        await self._end_of(name)

    async def transfers_until(self, stop: asyncio.Event) -> None:
        """Back to back."""
        while not stop.is_set():
            await self.transfer()


def run(settings: HarmlessSettings) -> int:
    console = reports.console_for(settings)
    return uvloop.run(until_interrupted(_run(settings, console), console))


async def _run(settings: HarmlessSettings, console: Console) -> int:
    model = resolve.ready(settings.model, "", console)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting a decode worker and computing the prompt", total=None)
        async with _running(settings, model, console) as bench:
            result = await _measure(bench, settings, progress, task)
    result |= {"model": model.model_id, "settings": settings.model_dump()}
    _show(result, console)
    reports.write_json(settings, result)
    return 0


@contextlib.asynccontextmanager
async def _running(settings: HarmlessSettings, model: ReadyModel, console: Console) -> AsyncIterator[Bench]:
    """Yields a decode worker and a sender beside it, connected."""
    plan = plan_cpu(tuple(os.sched_getaffinity(0)), prefill=1, decode=1, on_gpu=False, threads=settings.threads)
    if plan.control:
        # The processes that send and measure must not compute on the cores of the streams.
        os.sched_setaffinity(0, plan.control)
    far = Far("benchmarks.kv_interference_peer", str(model.path), str(settings.prompt_tokens))
    bench = Bench(settings, far)
    supervisor = Supervisor(log_dir=new_log_dir(), say=sayer(console))
    try:
        await far.start()
        shared = {
            "coordinator": await bench.control.start(), "model": str(model.path), "model_id": model.model_id,
            "log_format": "json", "kv_transport": settings.kv_transport,
        }  # fmt: skip
        serve = ServeSettings(device="cpu", kv_gib=_KV_GIB)
        supervisor.start(cluster.worker_spec("decode", 0, plan.decode[0], serve, shared, plan.control))
        tokens_address = await bench.tokens.start()
        async with asyncio.timeout(_START_TIMEOUT_S):
            await bench.up.wait()
        await bench.connect(tokens_address)
        yield bench
    finally:
        bench.failure.cancel()
        await far.close()
        await supervisor.close()
        await bench.control.close()
        await bench.tokens.close()


async def _measure(bench: Bench, settings: HarmlessSettings, progress: Progress, task: Any) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    gaps: dict[str, list[list[float]]] = {"alone": [], "beside": []}
    seconds = {"alone": 0.0, "beside": 0.0}
    running = [loop.create_task(bench.stream(index)) for index in range(settings.streams)]

    async def unless_failed(work: "asyncio.Task[None]") -> None:
        await asyncio.wait({work, bench.failure, *running}, return_when=asyncio.FIRST_COMPLETED)
        for one in (bench.failure, *running, work):
            if one.done():
                one.result()

    async def one_round(kind: str) -> None:
        stop = asyncio.Event()
        replaying = loop.create_task(bench.transfers_until(stop) if kind == "beside" else _nothing())
        try:
            start = clock.now()
            await asyncio.sleep(settings.seconds)
            end = clock.now()
        finally:
            stop.set()
            await replaying
        gaps[kind].append(gaps_between(list(bench.streams.values()), start, end))
        seconds[kind] += end - start

    try:
        progress.update(task, description="warming up")
        for _ in range(_WARMUP_TRANSFERS):
            await unless_failed(loop.create_task(bench.transfer()))
        bench.transfers = Transfers()
        kinds = [kind for number in range(settings.rounds) for kind in ("alone", "beside")[:: 1 - 2 * (number % 2)]]
        progress.update(task, description=f"{settings.streams} streams", total=len(kinds))
        for kind in kinds:
            await unless_failed(loop.create_task(one_round(kind)))
            progress.advance(task)
    finally:
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return figures(gaps, bench.transfers, seconds["beside"])


async def _nothing() -> None:
    return


def figures(gaps_s: dict[str, list[list[float]]], transfers: Transfers, beside_s: float) -> dict[str, Any]:
    """Returns the figures. `gaps_s`: gaps of each kind, by round."""
    found: dict[str, Any] = {}
    for kind, rounds in gaps_s.items():
        every = [1e3 * gap for one in rounds for gap in one]
        if not every:
            raise BenchFailed("no gap was measured: --seconds is too short for this model")
        found[kind] = {f"p{rank}_ms": percentile(every, rank / 100) for rank in (50, 95, 99)}
        found[kind] |= {"max_ms": max(every), "gaps": len(every)}
        found[kind]["p99_ms_by_round"] = [
            round(percentile([1e3 * gap for gap in one], 0.99), 2) for one in rounds if one
        ]
    for rank in ("p50", "p99"):
        found[f"{rank}_ratio"] = found["beside"][f"{rank}_ms"] / found["alone"][f"{rank}_ms"]
    return found | {
        "transfers": len(transfers.took_s),
        "kv_mib": transfers.kv_bytes / len(transfers.took_s) / (1 << 20),
        "transfer_p50_ms": 1e3 * percentile(transfers.took_s, 0.5),
        "transfer_gb_per_s": transfers.kv_bytes / sum(transfers.took_s) / 1e9,
        "gb_per_s": transfers.kv_bytes / beside_s / 1e9,
        "joined": transfers.joined,
    }


def _show(result: dict[str, Any], console: Console) -> None:
    table = tables.Table("Gap between tokens of one stream, ms", "", "p50", "p95", "p99", "max", "gaps")
    for kind, name in (("alone", "streams alone"), ("beside", "beside transfers")):
        row = result[kind]
        table.row(name, *(f"{row[key]:.1f}" for key in ("p50_ms", "p95_ms", "p99_ms", "max_ms")), str(row["gaps"]))
    table.show(console)
    console.print(
        f"beside / alone: p50 {result['p50_ratio']:.3f}, p99 [bold]{result['p99_ratio']:.3f}[/bold] (goal: ≤ {GOAL})"
    )
    console.print(
        f"{result['transfers']} transfers of {result['kv_mib']:.0f} MiB back to back, {result['transfer_p50_ms']:.0f} ms (p50),"
        f" {result['transfer_gb_per_s']:.2f} GB/s while one runs, {result['gb_per_s']:.2f} GB/s in all;"
        f" {result['joined']} joined a step before they were released"
    )
