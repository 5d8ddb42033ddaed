"""Reads multipart/form-data (RFC 7578) as it arrives, in bounded memory. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from email import message_from_string
from email.message import Message
from typing import Final

from gateway.http.errors import bad_value

_HEAD_BYTES_MAX: Final = 4 << 10
_BOUNDARY_CHARS_MAX: Final = 70
_NAME_CHARS_MAX: Final = 255
_PADDING_BYTES_MAX: Final = 64
"""Blanks behind a boundary."""


@dataclass(frozen=True)
class Part:
    """The beginning of a part; its content follows."""

    name: str
    filename: str | None


def boundary_of(content_type: str) -> bytes | None:
    """None: the body is not multipart/form-data."""
    head = Message()
    head["content-type"] = content_type[:1000].replace("\r", " ").replace("\n", " ")
    boundary = _text(head.get_param("boundary", ""))
    if head.get_content_type() != "multipart/form-data" or not 0 < len(boundary) <= _BOUNDARY_CHARS_MAX:
        return None
    return boundary.encode("latin-1", "replace")


class MultipartReader:
    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._rest = b"\r\n"  # the first boundary may be the first bytes
        self._step = self._skip
        self.is_complete = False
        """The last boundary has come."""

    def feed(self, data: bytes) -> Iterator[Part | bytes]:
        """Parts, and pieces of the content of the last one. Raises `ApiError` (400)."""
        self._rest += data
        while not self.is_complete:
            found = self._step()
            if found is None:
                return
            if found:
                yield found

    # Each step consumes data from `_rest`. It returns None if it needs more data, and empty bytes if it has nothing to yield.

    def _skip(self) -> Part | bytes | None:
        """Skip the text before the first boundary."""
        at = self._rest.find(self._delimiter)
        if at < 0:
            self._rest = self._rest[-len(self._delimiter) :]
            return None
        self._rest = self._rest[at + len(self._delimiter) :]
        self._step = self._boundary
        return b""

    def _boundary(self) -> Part | bytes | None:
        """Read the rest of a boundary: the end of its line, or of the whole body."""
        if self._rest.startswith(b"--"):
            self.is_complete = True
            return b""
        line, found, rest = self._rest.partition(b"\r\n")
        if not found and len(self._rest) <= _PADDING_BYTES_MAX:
            return None
        if line.strip(b" \t") or not found:
            raise bad_value(None, "The body is not valid multipart/form-data.", "invalid_multipart")
        self._rest, self._step = b"\r\n" + rest, self._head  # so that a part without any header ends as others do
        return b""

    def _head(self) -> Part | bytes | None:
        head, found, rest = self._rest.partition(b"\r\n\r\n")
        if len(head) > _HEAD_BYTES_MAX:
            raise bad_value(None, "A part of the body has headers that are too large.", "invalid_multipart")
        if not found:
            return None
        self._rest, self._step = rest, self._content
        return _part(head[2:])

    def _content(self) -> Part | bytes | None:
        at = self._rest.find(self._delimiter)
        if at < 0:  # the end of what is there may be the beginning of a boundary
            at = max(len(self._rest) - len(self._delimiter) + 1, 0)
            piece, self._rest = self._rest[:at], self._rest[at:]
            return piece or None
        piece, self._rest = self._rest[:at], self._rest[at + len(self._delimiter) :]
        self._step = self._boundary
        return piece


def _part(head: bytes) -> Part:
    """Raises `ApiError`."""
    headers = message_from_string(head.decode("utf-8", "replace"))
    name = headers.get_param("name", header="content-disposition")
    if headers.get_content_disposition() != "form-data" or name is None:
        raise bad_value(None, "A part of the body has no name.", "invalid_multipart")
    filename = headers.get_param("filename", header="content-disposition")
    return Part(_text(name), None if filename is None else _text(filename))


def _text(value: str | tuple[str | None, str | None, str]) -> str:
    """Returns a header parameter as text. Forms may not give a parameter its own charset. If one does, the charset is ignored,
    since it could name any codec of Python."""
    return (value if isinstance(value, str) else value[2]).encode("utf-8", "replace").decode()[:_NAME_CHARS_MAX]
