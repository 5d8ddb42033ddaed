"""Lines of a batch's input: cut from the bytes of an upload, and checked when a batch is made of them. Pure.

The check of a line does not validate its request. The request is validated when it runs, and the result reports any error.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec

from gateway.batches.files import Line
from gateway.http.encoding import encode
from gateway.http.errors import ApiError, bad_value

LINES_MAX: Final = 50_000
ERRORS_MAX: Final = 100  # Most errors of one batch; its check ends with the last of these
_CUSTOM_ID_CHARS_MAX: Final = 512
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class LineCutter:
    """Cuts a file that arrives in pieces into lines."""

    def __init__(self, line_bytes_max: int) -> None:
        self._line_bytes_max = line_bytes_max
        self._begun: list[bytes] = []
        self._begun_bytes = 0
        self.lines = 0
        self.requests = 0

    def feed(self, data: bytes) -> Iterator[Line]:
        """The lines that end in `data`. Raises `ApiError` (400) with the number of the line."""
        at = 0
        while (end := data.find(b"\n", at)) >= 0:
            yield self._line(data[at : end + 1])
            at = end + 1
        if at < len(data):
            self._begun.append(data[at:])
            self._begun_bytes += len(data) - at
            self._check_size(self._begun_bytes)

    def end(self) -> Iterator[Line]:
        """The last line, if it has no end of its own."""
        if self._begun:
            yield self._line(b"")

    def _line(self, last: bytes) -> Line:
        data = b"".join([*self._begun, last]) if self._begun else last
        self._begun, self._begun_bytes = [], 0
        self._check_size(len(data))
        self.lines += 1
        if self.lines > LINES_MAX:
            raise bad_value("file", f"The file has more than {LINES_MAX} lines.", "too_many_lines")
        is_request = bool(data.strip())
        self.requests += is_request
        return self.lines, is_request, data

    def _check_size(self, size: int) -> None:
        if size > self._line_bytes_max:
            message = f"Line {self.lines + 1} is longer than the {self._line_bytes_max} bytes allowed."
            raise bad_value("file", message, "line_too_large")


class BatchLine(msgspec.Struct, forbid_unknown_fields=True):
    """One request of a batch."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    """The fields that are checked before a request runs."""

    model: msgspec.Raw = msgspec.Raw(b"null")
    stream: msgspec.Raw = msgspec.Raw(b"null")


def parse_line(data: bytes) -> BatchLine:
    """Raises `ApiError` (400)."""
    try:
        return msgspec.json.decode(data.removeprefix(_BYTE_ORDER_MARK), type=BatchLine)
    except msgspec.ValidationError as error:
        raise bad_value(None, f"The line is not a request of a batch: {str(error)[:200]}.", "invalid_line") from None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise bad_value(None, f"The line is not valid JSON: {str(error)[:200]}.", "invalid_json_line") from None


class LineChecker:
    """Checks the lines of one batch, in their order."""

    def __init__(self, endpoint: str, check_model: Callable[[str], object]) -> None:
        """`check_model` raises `ApiError` for a model that is not served."""
        self._endpoint = endpoint
        self._check_model = check_model
        self._first_lines: dict[str, int] = {}  # The first line with each custom_id
        self.errors: list[dict[str, Any]] = []

    @property
    def total(self) -> int:
        return len(self._first_lines)

    def check(self, lines: Iterable[tuple[int, bytes]]) -> None:
        """Adds to `errors`, until there are `ERRORS_MAX`."""
        for number, data in lines:
            if len(self.errors) >= ERRORS_MAX:
                return
            try:
                self._check(number, parse_line(data))
            except ApiError as error:
                self.errors.append({"code": error.code, "line": number, "message": error.message, "param": error.param})

    def _check(self, number: int, line: BatchLine) -> None:
        if not 0 < len(line.custom_id) <= _CUSTOM_ID_CHARS_MAX:
            message = f"'custom_id' must have 1 to {_CUSTOM_ID_CHARS_MAX} characters."
            raise bad_value("custom_id", message)
        first = self._first_lines.setdefault(line.custom_id, number)
        if first != number:
            message = f"The 'custom_id' {line.custom_id[:100]!r} is that of line {first} too."
            raise bad_value("custom_id", message, "duplicate_custom_id")
        if line.method != "POST":
            raise bad_value("method", "'method' must be 'POST'.", "invalid_method")
        if line.url != self._endpoint:
            message = f"'url' must be {self._endpoint!r}, the endpoint of the batch."
            raise bad_value("url", message, "mismatched_url")
        try:
            body = msgspec.json.decode(line.body, type=_Body)
        except msgspec.MsgspecError as error:
            raise bad_value("body", f"'body' must be a JSON object: {str(error)[:200]}.") from None
        if bytes(body.stream) == b"true":
            raise bad_value("body.stream", "'stream' is not possible in a batch.", "unsupported_parameter")
        model = bytes(body.model)
        if model.startswith(b'"'):
            self._check_model(msgspec.json.decode(model))


def result(line_id: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """The line of an answered request, as OpenAI has it; also of one that was refused or failed."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return encode({"id": line_id, "custom_id": custom_id, "response": response, "error": None}) + b"\n"


def unanswered(line_id: str, custom_id: str, code: str, message: str) -> bytes:
    """The line of a request that did not run."""
    error = {"code": code, "message": message}
    return encode({"id": line_id, "custom_id": custom_id, "response": None, "error": error}) + b"\n"
