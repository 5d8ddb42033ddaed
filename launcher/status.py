"""`crossdock status`: ask the coordinator what it knows, and show it."""

import asyncio
import os
import socket
import sys
from typing import Any

import msgspec
import uvloop
from pydantic import Field
from rich.console import Console
from rich.table import Table

from proto import limits
from proto.errors import CrossdockError
from proto.messages import Hello, Message, Role, StatusReport, StatusRequest, Welcome
from runtime import clock
from runtime.link import LinkClient, LinkSettings, Peer
from runtime.settings import Address, Options


class StatusSettings(Options):
    """Show workers, queues and running requests of a cluster."""

    coordinator: Address = Field("tcp://127.0.0.1:7070", description="Address of the coordinator.")
    as_json: bool = Field(False, description="Print JSON, for programs.", json_schema_extra={"option": "--json"})
    timeout_ms: int = Field(3_000, ge=1, le=600_000, description="Milliseconds to wait for an answer.")


class NoAnswer(CrossdockError):
    """The coordinator did not answer in time."""


async def ask(coordinator: str, timeout_ms: int) -> StatusReport:
    """Connect as an observer, ask once, close. Raises `NoAnswer`."""
    answer: asyncio.Future[StatusReport] = asyncio.get_running_loop().create_future()

    def on_up(peer: Peer, _welcome: Welcome) -> None:
        peer.send(StatusRequest())

    def on_message(_peer: Peer, message: Message, _blob: bytes) -> None:
        if isinstance(message, StatusReport) and not answer.done():
            answer.set_result(message)

    def on_down(_peer: Peer, _reason: str) -> None:
        pass  # the client connects again, and the timeout bounds it all

    hello = Hello(
        version=limits.PROTOCOL_VERSION,
        role=Role.OBSERVER,
        epoch=clock.new_epoch(),
        name=f"status-{os.getpid()}",
        host=socket.gethostname()[: limits.MAX_TEXT_CHARS],
        pid=os.getpid(),
    )
    link_settings = LinkSettings(handshake_timeout_ms=timeout_ms)
    link = LinkClient(
        address=coordinator, hello=hello, on_up=on_up, on_message=on_message, on_down=on_down, settings=link_settings
    )
    await link.start()
    try:
        return await asyncio.wait_for(answer, timeout_ms / 1000)
    except TimeoutError:
        why = link.last_error or f"no answer from {coordinator}"
        raise NoAnswer(f"{why} (waited {timeout_ms} ms). Is a coordinator running there? See --coordinator.") from None
    finally:
        await link.close()


def run(settings: StatusSettings) -> int:
    report = uvloop.run(ask(settings.coordinator, settings.timeout_ms))
    if settings.as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(as_dict(report)), indent=2).decode() + "\n")
    else:
        show(report, Console())
    return 0


def as_dict(report: StatusReport) -> dict[str, Any]:
    """Field names for everything; on the wire structs are arrays."""
    fields = {name: getattr(report, name) for name in report.__struct_fields__}
    workers = [{name: getattr(worker, name) for name in worker.__struct_fields__} for worker in report.workers]
    return fields | {"workers": workers}


def show(report: StatusReport, console: Console) -> None:
    table = Table(title="Workers", title_justify="left")
    table.add_column("name")
    table.add_column("role")
    table.add_column("model")
    table.add_column("host")
    for heading in ("pid", "requests", "steps in flight", "KV blocks used", "of", "tokens forwarded"):
        table.add_column(heading, justify="right")
    for worker in report.workers:
        numbers = (worker.pid, worker.requests, worker.steps_in_flight, worker.kv_blocks_used, worker.kv_blocks)
        table.add_row(
            worker.name,
            worker.role.value,
            worker.model,
            worker.host,
            *(str(number) for number in numbers),
            f"{worker.tokens_forwarded:,}",
        )
    if report.workers:
        console.print(table)
    else:
        console.print("No workers are connected.")
    console.print(f"Gateways: {', '.join(report.gateways) or 'none'}")
    console.print(f"Queued: {report.queued}   Running: {_counts(report.running)}   Ended: {_counts(report.finished)}")
    if report.counters:
        console.print(f"Counters: {_counts(report.counters)}")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in counts.items() if number) or "none"
