"""Reads an uploaded file into the store while it arrives: at most about a mebibyte of it is in memory."""

import asyncio
from functools import partial
from typing import Any, Final

from fastapi import Request
from starlette.requests import ClientDisconnect

from gateway.backend import ClientLeft
from gateway.batches import files
from gateway.batches.files import File, Line
from gateway.batches.lines import LineCutter
from gateway.batches.service import BatchService
from gateway.batches.types import UploadRequest
from gateway.http.body import Intake
from gateway.http.errors import ApiError, bad_value
from gateway.http.multipart import MultipartReader, Part, boundary_of
from gateway.openai.request_types import validate
from runtime.process import clock

PIECE_BYTES: Final = 1 << 20
"""Bytes that are written in one transaction."""
LINE_SLACK_BYTES: Final = 4 << 10
"""Bytes that a line may have beside the body of its request."""
_SLICE_BYTES: Final = 16 << 10
"""Bytes that are cut into lines in one turn. Cutting short lines takes milliseconds and blocks the event loop."""
_FIELD_BYTES_MAX: Final = 1 << 10
_PARTS_MAX: Final = 16


async def upload(request: Request, service: BatchService, intake: Intake, tenant: str, owner: str) -> File:
    """Raises `ApiError` and `ClientLeft`."""
    boundary = boundary_of(request.headers.get("content-type", ""))
    if boundary is None:
        raise ApiError(415, "The Content-Type must be multipart/form-data.", code="unsupported_media_type")
    one = _Upload(service, tenant, intake.body_bytes_max + LINE_SLACK_BYTES)
    reader = MultipartReader(boundary)
    with intake.bytes_held(owner, 2 * PIECE_BYTES):
        try:
            async with asyncio.timeout(intake.client_timeout_s):
                async for data in request.stream():
                    for at in range(0, len(data), _SLICE_BYTES):
                        for found in reader.feed(data[at : at + _SLICE_BYTES]):
                            await one.take(found)
                        await asyncio.sleep(0)
            if not reader.is_complete:
                raise bad_value(None, "The body ends before its last boundary.", "invalid_multipart")
            return await one.end()
        except TimeoutError:
            raise ApiError(408, "The body took too long to arrive.", code="request_timeout") from None
        except ClientDisconnect:
            raise ClientLeft from None
        finally:
            await one.close()


class _Upload:
    def __init__(self, service: BatchService, tenant: str, line_bytes_max: int) -> None:
        self._service = service
        self._tenant = tenant
        self._cutter = LineCutter(line_bytes_max)
        self._lines: list[Line] = []
        self._lines_bytes = 0
        self._file_id = ""
        self._file_bytes = 0
        self._parts = 0
        self._field: str | None = None
        """The form's field whose value is arriving; None: the file is."""
        self._fields: dict[str, bytes] = {}

    async def take(self, found: Part | bytes) -> None:
        """Raises `ApiError`."""
        if isinstance(found, Part):
            await self._begin(found)
        elif self._field is not None:
            value = self._fields[self._field] + found
            if len(value) > _FIELD_BYTES_MAX:
                raise bad_value(self._field, f"The field has more than {_FIELD_BYTES_MAX} bytes.")
            self._fields[self._field] = value
        else:
            self._file_bytes += len(found)
            if self._file_bytes > self._service.file_bytes_max:
                message = f"The file is larger than the {self._service.file_bytes_max} bytes allowed."
                raise ApiError(413, message, code="request_too_large", param="file")
            self._add(self._cutter.feed(found))
            if self._lines_bytes >= PIECE_BYTES:
                await self._flush()

    async def _begin(self, part: Part) -> None:
        self._parts += 1
        if self._parts > _PARTS_MAX:
            raise bad_value(None, f"The form has more than {_PARTS_MAX} parts.", "invalid_multipart")
        if part.name != "file":
            self._field = part.name
            self._fields[part.name] = b""
            return
        if self._file_id:
            raise bad_value("file", "Send one file.")
        self._field = None
        work = partial(files.begin, now=clock.unix_time(), most=self._service.tenant_bytes_max)
        self._file_id = await self._service.write(work, self._tenant, part.filename or "file")

    def _add(self, lines: Any) -> None:
        for line in lines:
            self._lines.append(line)
            self._lines_bytes += len(line[2])

    async def _flush(self) -> None:
        lines, self._lines, self._lines_bytes = self._lines, [], 0
        most = self._service.tenant_bytes_max
        await self._service.write(files.append, self._tenant, self._file_id, lines, most)

    async def end(self) -> File:
        """Raises `ApiError`."""
        request = validate(UploadRequest, self._form(), {})
        self._add(self._cutter.end())
        if not self._cutter.requests:
            raise bad_value("file", "The file has no lines.", "empty_file")
        await self._flush()
        keep_s = self._service.keep_s
        if request.expires_after is not None:
            keep_s = min(keep_s, request.expires_after.seconds)
        file = await self._service.write(files.end, self._tenant, self._file_id, int(clock.unix_time()) + keep_s)
        self._file_id = ""
        return file

    def _form(self) -> dict[str, Any]:
        """The form as an object. Fields of an object are named `object[field]`."""
        form: dict[str, Any] = {"file": ""} if self._file_id else {}
        for name, value in self._fields.items():
            text = value.decode("utf-8", "replace")
            outer, inner, rest = name.partition("[")
            if inner and rest.endswith("]"):
                whole = form.setdefault(outer, {})
                if isinstance(whole, dict):
                    whole[rest[:-1]] = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text
            else:
                form[name] = text
        return form

    async def close(self) -> None:
        """Delete everything that a failed upload has stored."""
        if self._file_id:
            await self._service.write(files.give_up, self._file_id)
