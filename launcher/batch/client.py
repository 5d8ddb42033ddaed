"""/v1/files and /v1/batches as a client uses them."""

import asyncio
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from launcher.http.client import ERROR_BYTES_MAX, read_whole, reason
from proto.errors import CrossdockError

ANSWER_S: Final = 60.0  # for an answer, and for the next piece of a file


class BatchFailed(CrossdockError):
    """The server refused something; `str()` says what."""


class Unreachable(CrossdockError):
    """The server does not answer, or not now."""


class BatchClient:
    def __init__(self, base_url: str, key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_S, sock_read=ANSWER_S)
        self._session = aiohttp.ClientSession(base_url, headers=headers, timeout=timeout, trust_env=False)

    async def close(self) -> None:
        await self._session.close()

    async def upload(self, path: Path) -> str:
        """The id of the file. Raises `BatchFailed`, `Unreachable`."""
        with path.open("rb") as file:
            form = aiohttp.FormData({"purpose": "batch"})
            form.add_field("file", file, filename=path.name, content_type="application/jsonl")
            found = await self._json("POST", "/v1/files", data=form)
        return str(found["id"])

    async def create(self, file_id: str, endpoint: str, window: str) -> dict[str, Any]:
        """Raises `BatchFailed`, `Unreachable`."""
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
        return await self._json("POST", "/v1/batches", json=body)

    async def batch(self, batch_id: str) -> dict[str, Any]:
        """Raises `BatchFailed`, `Unreachable`."""
        return await self._json("GET", f"/v1/batches/{batch_id}")

    async def cancel(self, batch_id: str) -> dict[str, Any]:
        """Raises `BatchFailed`, `Unreachable`."""
        return await self._json("POST", f"/v1/batches/{batch_id}/cancel")

    async def download(self, file_id: str, path: Path) -> None:
        """Raises `BatchFailed`, `Unreachable`, `OSError`."""
        part = path.with_name(f"{path.name}.part")
        try:
            async with self._session.get(f"/v1/files/{file_id}/content") as response:
                await _check(response)
                with part.open("wb") as file:
                    async for data in response.content.iter_chunked(1 << 20):
                        file.write(data)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unreachable(str(error) or "no answer") from None
        await asyncio.to_thread(part.replace, path)

    async def _json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            async with self._session.request(method, path, **options) as response:
                await _check(response)
                found: dict[str, Any] = msgspec.json.decode(await response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unreachable(str(error) or "no answer") from None
        except msgspec.DecodeError:
            raise BatchFailed(f"{method} {path}: the server's answer is not JSON") from None
        return found


async def _check(response: aiohttp.ClientResponse) -> None:
    """Raises `BatchFailed`, `Unreachable`."""
    if response.status == 200:
        return
    why = reason(await read_whole(response, ERROR_BYTES_MAX))
    raise (Unreachable if response.status == 503 else BatchFailed)(f"HTTP {response.status}: {why}")
