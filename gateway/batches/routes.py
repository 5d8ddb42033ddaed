"""/v1/files and /v1/batches: what clients do with them. `runner` does the work."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response, StreamingResponse

from gateway.backend import ClientLeft
from gateway.batches import batches, files
from gateway.batches.batches import WantedBatch
from gateway.batches.files import File
from gateway.batches.service import BatchService, service_of
from gateway.batches.types import (
    BatchList,
    BatchObject,
    CreateBatchRequest,
    DeletedFile,
    FileList,
    FileObject,
    UploadRequest,
    listed,
    window_h,
)
from gateway.batches.upload import PIECE_BYTES, upload
from gateway.http.encoding import JsonResponse
from gateway.http.errors import ApiError, bad_value
from gateway.http.json_text import parse_json
from gateway.openai.dependencies import Call, CallDep
from gateway.openai.openapi import body_of, refusals
from gateway.openai.request_types import validate
from runtime.process import clock

router = APIRouter(tags=["Batches"])
_LIMIT_MAX_FILES = 10_000
_FILES_PAGE_MAX = 1_000
"""More are on the next page, whatever the limit."""
_LIMIT_MAX_BATCHES = 100


async def _entered(call: Call) -> BatchService:
    """Raises `ApiError` where this gateway has no store, or too much to do."""
    service = service_of(call.request)
    await call.slots()
    return service


@router.post(
    "/v1/files",
    summary="Upload the requests of a batch.",
    response_model=FileObject,
    responses=refusals(400, 401, 403, 404, 408, 413, 415, 429, 503),
    openapi_extra=body_of(UploadRequest, "multipart/form-data"),
)
async def upload_file(call: CallDep) -> dict[str, Any]:
    service = await _entered(call)
    try:
        gateway = call.gateway
        file = await upload(call.request, service, gateway.intake, gateway.threads, call.tenant, call.owner)
    except ClientLeft:
        raise ApiError(408, "The client left.", code="request_timeout") from None
    return file.shown()


@router.get(
    "/v1/files", summary="Files of this tenant.", response_model=FileList, responses=refusals(400, 401, 404, 429, 503)
)
async def list_files(
    call: CallDep, after: str = "", limit: str = "10000", order: str = "desc", purpose: str = ""
) -> Response:
    service = await _entered(call)
    most = min(_number("limit", limit, _LIMIT_MAX_FILES), _FILES_PAGE_MAX)
    if order not in ("asc", "desc"):
        raise bad_value("order", "Invalid value for 'order': it must be 'asc' or 'desc'.")
    found = await service.read(files.listed, call.tenant, after, most + 1, order == "desc", purpose)
    return JsonResponse(listed([file.shown() for file in found], most))


@router.get(
    "/v1/files/{file_id}", summary="One file.", response_model=FileObject, responses=refusals(401, 404, 429, 503)
)
async def get_file(call: CallDep, file_id: str) -> dict[str, Any]:
    service = await _entered(call)
    return (await service.read(files.get, call.tenant, file_id)).shown()


@router.delete(
    "/v1/files/{file_id}",
    summary="Delete a file.",
    response_model=DeletedFile,
    responses=refusals(401, 404, 409, 429, 503),
)
async def delete_file(call: CallDep, file_id: str) -> dict[str, Any]:
    service = await _entered(call)
    await service.write(files.delete, call.tenant, file_id)
    return {"id": file_id, "object": "file", "deleted": True}


@router.get(
    "/v1/files/{file_id}/content",
    summary="The content of a file.",
    response_class=Response,
    responses=refusals(401, 404, 429, 503)
    | {200: {"description": "JSON lines.", "content": {"application/jsonl": {"schema": {"type": "string"}}}}},
)
async def get_content(call: CallDep, file_id: str) -> Response:
    service = await _entered(call)
    file = await service.read(files.get, call.tenant, file_id)
    headers = {"Content-Length": str(file.bytes)}
    return StreamingResponse(_pieces(service, file), headers=headers, media_type="application/jsonl")


async def _pieces(service: BatchService, file: File) -> AsyncIterator[bytes]:
    number, data = await service.read(files.content, file, 0, PIECE_BYTES)
    while data:
        yield data
        number, data = await service.read(files.content, file, number, PIECE_BYTES)


@router.post(
    "/v1/batches",
    summary="Run the requests of a file when there is capacity to spare.",
    response_model=BatchObject,
    responses=refusals(400, 401, 403, 404, 408, 413, 415, 429, 503),
    openapi_extra=body_of(CreateBatchRequest),
)
async def create_batch(call: CallDep) -> dict[str, Any]:
    service = await _entered(call)
    try:
        async with call.gateway.intake.body(call.request, call.owner) as body:
            read = partial(_read, body)
            asked = await call.gateway.threads.run(call.owner, len(body), read)
    except ClientLeft:
        raise ApiError(408, "The client left.", code="request_timeout") from None
    keep_s = service.keep_s
    if asked.output_expires_after is not None:
        keep_s = min(keep_s, asked.output_expires_after.seconds)
    window = asked.completion_window
    wanted = WantedBatch(asked.input_file_id, asked.endpoint, window, window_h(window) * 3600, asked.metadata, keep_s)
    most = service.tenant_bytes_max
    batch = await service.write(batches.create, call.tenant, wanted, clock.unix_time(), most)
    service.wake()
    return batch.shown()


def _read(body: bytes) -> CreateBatchRequest:
    return validate(CreateBatchRequest, parse_json(body), {})


@router.get(
    "/v1/batches",
    summary="Batches of this tenant, the newest first.",
    response_model=BatchList,
    responses=refusals(400, 401, 404, 429, 503),
)
async def list_batches(call: CallDep, after: str = "", limit: str = "20") -> Response:
    service = await _entered(call)
    most = _number("limit", limit, _LIMIT_MAX_BATCHES)
    found = await service.read(batches.listed, call.tenant, after, most + 1)
    return JsonResponse(listed([batch.shown() for batch in found], most))


@router.get(
    "/v1/batches/{batch_id}", summary="One batch.", response_model=BatchObject, responses=refusals(401, 404, 429, 503)
)
async def get_batch(call: CallDep, batch_id: str) -> dict[str, Any]:
    service = await _entered(call)
    return (await service.read(batches.get, call.tenant, batch_id)).shown()


@router.post(
    "/v1/batches/{batch_id}/cancel",
    summary="End a batch without the requests that have not run.",
    response_model=BatchObject,
    responses=refusals(401, 404, 409, 429, 503),
)
async def cancel_batch(call: CallDep, batch_id: str) -> dict[str, Any]:
    service = await _entered(call)
    batch = await service.write(batches.cancel, call.tenant, batch_id, int(clock.unix_time()))
    service.wake()
    return batch.shown()


def _number(param: str, text: str, most: int) -> int:
    """Raises `ApiError`."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 0 < int(text) <= most):
        raise bad_value(param, f"Invalid value for '{param}': it must be a whole number from 1 to {most}.")
    return int(text)
