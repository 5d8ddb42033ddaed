"""Short words for files and batches over a fake cluster."""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import httpx

from gateway.app import create_app
from gateway.batches.runner import BatchRunner
from gateway.batches.sqlite_store import SqliteBatchStore
from gateway.batches.store import DAY_S, BatchService, BatchStore, Database
from gateway.metrics import BatchMetrics
from runtime.metrics.registry import MetricsRegistry
from runtime.process.driver import cancelled
from tests.gateway.fakes import MODEL, Site, make_site
from tests.helpers import until

KEYS = {"acme": "key-of-acme", "bell": "key-of-bell"}
TENANTS = "".join(
    f'[tenants.{name}]\nslo_ttft_ms = 0.001\nkeys = ["{hashlib.sha256(key.encode()).hexdigest()}"]\n'
    for name, key in KEYS.items()
)


class Desk:
    """A gateway with a store, and its runner where it has one."""

    def __init__(self, site: Site, service: BatchService, lines_max: int = 8) -> None:
        self.site = site
        self.service = service
        self.app = create_app(site.gateway, service)
        self.lines_max = lines_max
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        metrics = BatchMetrics(MetricsRegistry("gateway"))
        self._task = asyncio.create_task(BatchRunner(self.site.gateway, self.service, metrics, self.lines_max).run())

    async def kill(self) -> None:
        """The runner ends, as if its process had been killed: no line is finished."""
        if self._task is not None:
            await cancelled(self._task)
            self._task = None

    restart = start

    def client(self, key: str = "") -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60, headers=headers)

    async def ask(self, method: str, path: str, key: str = "", **options: Any) -> httpx.Response:
        async with self.client(key) as client:
            return await client.request(method, path, **options)

    async def upload(self, content: bytes, key: str = "", **fields: str) -> httpx.Response:
        return await self.ask(
            "POST", "/v1/files", key, files={"file": ("in.jsonl", content)}, data={"purpose": "batch", **fields}
        )

    async def file(self, content: bytes, key: str = "") -> str:
        answer = await self.upload(content, key)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    async def create(self, file_id: str, key: str = "", **fields: Any) -> httpx.Response:
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h", **fields}
        return await self.ask("POST", "/v1/batches", key, json=body)

    async def batch(self, content: bytes, key: str = "", **fields: Any) -> str:
        answer = await self.create(await self.file(content, key), key, **fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    async def get(self, batch_id: str, key: str = "") -> dict[str, Any]:
        answer = await self.ask("GET", f"/v1/batches/{batch_id}", key)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def ended(self, batch_id: str, key: str = "") -> dict[str, Any]:
        return await self.reached(
            batch_id, lambda batch: batch["status"] in ("completed", "failed", "expired", "cancelled"), key
        )

    async def reached(
        self, batch_id: str, condition: Callable[[dict[str, Any]], bool], key: str = ""
    ) -> dict[str, Any]:
        async with asyncio.timeout(30):
            while True:
                found = await self.get(batch_id, key)
                if condition(found):
                    return found
                await asyncio.sleep(0.01)

    async def lines_of(self, file_id: str, key: str = "") -> list[dict[str, Any]]:
        answer = await self.ask("GET", f"/v1/files/{file_id}/content", key)
        assert answer.status_code == 200, answer.text
        return [json.loads(line) for line in answer.content.splitlines()]


def store_at(place: Path | str) -> BatchStore:
    """`place`: an SQLite file, or the URL of a database."""
    if isinstance(place, Path):
        return SqliteBatchStore(place)
    from gateway.batches.postgres_store import PostgresBatchStore

    return PostgresBatchStore(place, "a gateway")


def on_desk(test: Callable[[Desk], Awaitable[None]], place: Path | str, **options: Any) -> None:
    """`options`: of the service, `lines_max`, and of the site."""

    async def body() -> None:
        bounds = {"file_bytes_max": 1 << 20, "tenant_bytes_max": 8 << 20, "keep_s": 30 * DAY_S}
        bounds = {name: options.pop(name, value) for name, value in bounds.items()}
        lines_max, body_bytes_max = options.pop("lines_max", 8), options.pop("body_bytes_max", None)
        site = make_site(**options)
        if body_bytes_max:
            site.gateway.intake.body_bytes_max = body_bytes_max
        store = store_at(place)
        await store.open()
        desk = Desk(site, BatchService(store, **bounds), lines_max)  # type: ignore[arg-type]
        try:
            await test(desk)
        finally:
            await desk.kill()
            await until(lambda: not site.gateway.backend.keeper.streams)
            await until(lambda: site.gateway.intake.idle)
            await store.close()
            site.gateway.threads.shutdown()

    asyncio.run(body())


def request(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    content = {"model": MODEL, "prompt": f"Say {custom_id}", "max_tokens": 64, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": content}


def jsonl(requests: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in requests)


def requests(count: int) -> list[dict[str, Any]]:
    return [request(f"r{number}") for number in range(count)]


async def left(desk: Desk) -> dict[str, int]:
    """Rows in the store, by table."""
    tables = ("files", "lines", "batches", "results")

    def count(db: Database) -> dict[str, int]:
        return {name: db.execute(f"SELECT COUNT(*) FROM {name}").fetchone()[0] for name in tables}

    return await desk.service.store.read(count)
