"""Reads an uploaded file into the store while it arrives: at most about a mebibyte of it is in memory."""

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

from starlette.requests import Request

from gateway.batches import files
from gateway.batches.files import File, Line
from gateway.batches.lines import LineCutter
from gateway.batches.store import BatchService
from gateway.batches.types import UploadRequest
from gateway.http.body import Intake, check_encoding
from gateway.http.errors import ApiError, bad_value, bare_errors
from gateway.http.multipart import MultipartReader, Part, boundary_of
from gateway.openai.request_types import validate
from gateway.text.tokenizer_threads import TokenizerThreads
from runtime.process import clock

PIECE_BYTES: Final = 1 << 20  # Bytes that are written in one transaction
LINE_SLACK_BYTES: Final = 4 << 10  # Bytes that a line may have beside the body of its request
_FIELD_BYTES_MAX: Final = 1 << 10

logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it logs bytes of clients, one line for each bad form


async def upload(
    request: Request, service: BatchService, intake: Intake, threads: TokenizerThreads, tenant: str, owner: str
) -> File:
    """Raises `ApiError` and `ClientDisconnect`."""
    boundary = boundary_of(request.headers.get("content-type", ""))
    if boundary is None:
        raise ApiError(415, "The Content-Type must be multipart/form-data.", code="unsupported_media_type")
    check_encoding(request)
    form = _Form(boundary, intake.body_bytes_max + LINE_SLACK_BYTES, service.file_bytes_max)
    write, most, file_id = service.store.write_soon, service.tenant_bytes_max, ""
    with intake.bytes_held(owner, 2 * PIECE_BYTES):
        try:
            async with asyncio.timeout(intake.client_timeout_s):
                async for data in request.stream():
                    # Not on the event loop: heads and short lines cost up to a microsecond for each byte.
                    await threads.run(owner, len(data), partial(form.feed, data))
                    if form.file_name is not None and not file_id:
                        file_id = await write(files.begin, tenant, form.file_name, clock.unix_time(), most)
                    if form.lines_bytes >= PIECE_BYTES:
                        await write(files.append, tenant, file_id, form.take_lines(), most)
            asked = form.end()
            await write(files.append, tenant, file_id, form.take_lines(), most)
            keep_s = min(service.keep_s, asked.expires_after.seconds if asked.expires_after else service.keep_s)
            file = await write(files.end, tenant, file_id, int(clock.unix_time()) + keep_s)
            file_id = ""
            return file
        except TimeoutError:
            raise ApiError(408, "The body took too long to arrive.", code="request_timeout") from None
        finally:
            if file_id:  # the upload has failed
                await write(files.give_up, file_id)


class _Form:
    """Reads the form. Used by one thread at a time."""

    def __init__(self, boundary: bytes, line_bytes_max: int, file_bytes_max: int) -> None:
        self._reader = MultipartReader(boundary)
        self._cutter = LineCutter(line_bytes_max)
        self._file_bytes_max = file_bytes_max
        self._file_bytes = 0
        self._field: str | None = None  # The form's field whose value is arriving; None: the file is
        self._fields: dict[str, bytes] = {}
        self.file_name: str | None = None  # None: the file has not begun
        self.lines: list[Line] = []  # Lines that are not stored yet
        self.lines_bytes = 0

    @bare_errors
    def feed(self, data: bytes) -> None:
        """Raises `ApiError`."""
        for found in self._reader.feed(data):
            if isinstance(found, Part):
                self._begin(found)
            elif self._field is not None:
                value = self._fields[self._field] + found
                if len(value) > _FIELD_BYTES_MAX:
                    raise bad_value(self._field, f"The field has more than {_FIELD_BYTES_MAX} bytes.")
                self._fields[self._field] = value
            else:
                self._file_bytes += len(found)
                if self._file_bytes > self._file_bytes_max:
                    message = f"The file is larger than the {self._file_bytes_max} bytes allowed."
                    raise ApiError(413, message, code="request_too_large", param="file")
                self._add(self._cutter.feed(found))

    def _begin(self, part: Part) -> None:
        if part.name != "file":
            self._field = part.name
            self._fields[part.name] = b""
            return
        if self.file_name is not None:
            raise bad_value("file", "Send one file.")
        self._field, self.file_name = None, part.filename or "file"

    def _add(self, lines: Iterable[Line]) -> None:
        for line in lines:
            self.lines.append(line)
            self.lines_bytes += len(line[2])

    def take_lines(self) -> list[Line]:
        lines, self.lines, self.lines_bytes = self.lines, [], 0
        return lines

    def end(self) -> UploadRequest:
        """The other fields. Raises `ApiError`."""
        if not self._reader.is_complete:
            raise bad_value(None, "The body ends before its last boundary.", "invalid_multipart")
        request = validate(UploadRequest, self._as_object(), {})
        self._add(self._cutter.end())
        if not self._cutter.requests:
            raise bad_value("file", "The file has no lines.", "empty_file")
        return request

    def _as_object(self) -> dict[str, Any]:
        """The form as an object. Fields of an object are named `object[field]`."""
        form: dict[str, Any] = {"file": ""} if self.file_name is not None else {}
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
