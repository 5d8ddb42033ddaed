"""/v1/files and /v1/batches: what clients do with them. `runner` does the work."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Final

from starlette.responses import Response, StreamingResponse

from gateway.batches import batches, files
from gateway.batches.files import File
from gateway.batches.store import BatchService, service_of
from gateway.batches.types import CreateBatchRequest, listed
from gateway.batches.upload import PIECE_BYTES, upload
from gateway.http.encoding import JsonResponse
from gateway.http.errors import bad_value
from gateway.openai.call import Call, route
from gateway.openai.request_types import validate
from runtime.process import clock

_LIMIT_MAX_FILES = 10_000
_FILES_PAGE_MAX = 1_000  # More are on the next page, whatever the limit
_LIMIT_MAX_BATCHES = 100


async def _entered(call: Call) -> BatchService:
    """Raises `ApiError` where this gateway has no store, or too much to do."""
    service = service_of(call.request)
    await call.slots()
    return service


async def upload_file(call: Call) -> Response:
    service = await _entered(call)
    gateway = call.gateway
    file = await upload(call.request, service, gateway.intake, gateway.threads, call.tenant, call.owner)
    return JsonResponse(file.shown())


async def list_files(call: Call) -> Response:
    service = await _entered(call)
    query = call.request.query_params
    most = min(_limit(call, _LIMIT_MAX_FILES, _LIMIT_MAX_FILES), _FILES_PAGE_MAX)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_value("order", "Invalid value for 'order': it must be 'asc' or 'desc'.")
    after, purpose = query.get("after", ""), query.get("purpose", "")
    found = await service.store.read(files.listed, call.tenant, after, most + 1, order == "desc", purpose)
    return JsonResponse(listed([file.shown() for file in found], most))


async def get_file(call: Call) -> Response:
    service = await _entered(call)
    file = await service.store.read(files.get, call.tenant, call.request.path_params["file_id"])
    return JsonResponse(file.shown())


async def delete_file(call: Call) -> Response:
    service = await _entered(call)
    file_id = call.request.path_params["file_id"]
    await service.store.write_soon(files.delete, call.tenant, file_id)
    return JsonResponse({"id": file_id, "object": "file", "deleted": True})


async def get_content(call: Call) -> Response:
    service = await _entered(call)
    file = await service.store.read(files.get, call.tenant, call.request.path_params["file_id"])
    headers = {"Content-Length": str(file.bytes)}
    return StreamingResponse(_pieces(service, file), headers=headers, media_type="application/jsonl")


async def _pieces(service: BatchService, file: File) -> AsyncIterator[bytes]:
    number, data = await service.store.read(files.content, file, 0, PIECE_BYTES)
    while data:
        yield data
        number, data = await service.store.read(files.content, file, number, PIECE_BYTES)


async def create_batch(call: Call) -> Response:
    service = service_of(call.request)
    asked = await call.parsed(partial(validate, CreateBatchRequest, neutral={}))
    keep_s = service.keep_s
    if asked.output_expires_after is not None:
        keep_s = min(keep_s, asked.output_expires_after.seconds)
    most = service.tenant_bytes_max
    batch = await service.store.write_soon(batches.create, call.tenant, asked, keep_s, clock.unix_time(), most)
    service.wake()
    return JsonResponse(batch.shown())


async def list_batches(call: Call) -> Response:
    service = await _entered(call)
    most = _limit(call, 20, _LIMIT_MAX_BATCHES)
    found = await service.store.read(batches.listed, call.tenant, call.request.query_params.get("after", ""), most + 1)
    return JsonResponse(listed([batch.shown() for batch in found], most))


async def get_batch(call: Call) -> Response:
    service = await _entered(call)
    batch = await service.store.read(batches.get, call.tenant, call.request.path_params["batch_id"])
    return JsonResponse(batch.shown())


async def cancel_batch(call: Call) -> Response:
    service = await _entered(call)
    batch_id = call.request.path_params["batch_id"]
    batch = await service.store.write_soon(batches.cancel, call.tenant, batch_id, int(clock.unix_time()))
    service.wake()
    return JsonResponse(batch.shown())


def _limit(call: Call, default: int, most: int) -> int:
    """The query's `limit`. Raises `ApiError`."""
    text = call.request.query_params.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 0 < int(text) <= most):
        raise bad_value("limit", f"Invalid value for 'limit': it must be a whole number from 1 to {most}.")
    return int(text)


ROUTES: Final = (
    route("POST", "/v1/files", upload_file),
    route("GET", "/v1/files", list_files),
    route("GET", "/v1/files/{file_id}", get_file),
    route("DELETE", "/v1/files/{file_id}", delete_file),
    route("GET", "/v1/files/{file_id}/content", get_content),
    route("POST", "/v1/batches", create_batch),
    route("GET", "/v1/batches", list_batches),
    route("GET", "/v1/batches/{batch_id}", get_batch),
    route("POST", "/v1/batches/{batch_id}/cancel", cancel_batch),
)
