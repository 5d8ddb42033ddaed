"""Reads multipart/form-data (RFC 7578) as it arrives, in bounded memory, with the parser that Starlette uses. Pure."""

from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote_to_bytes

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from gateway.http.errors import bad_value

_HEADERS_MAX: Final = 8
_HEADER_BYTES_MAX: Final = 4 << 10
_PARTS_MAX: Final = 16
_PARAMETERS_MAX: Final = 32  # of a Content-Disposition; thousands would take milliseconds to parse
_BOUNDARY_CHARS_MAX: Final = 70
_NAME_CHARS_MAX: Final = 255


@dataclass(frozen=True)
class Part:
    """The beginning of a part; its content follows."""

    name: str
    filename: str | None


def boundary_of(content_type: str) -> bytes | None:
    """None: the body is not multipart/form-data."""
    kind, options = parse_options_header(content_type[:1000].encode("latin-1", "replace"))
    boundary = options.get(b"boundary", b"")
    return boundary if kind == b"multipart/form-data" and 0 < len(boundary) <= _BOUNDARY_CHARS_MAX else None


class MultipartReader:
    def __init__(self, boundary: bytes) -> None:
        self._found: list[Part | bytes] = []
        self._parts = 0
        self._header = b""
        self._value = b""
        self._disposition = b""
        self.is_complete = False  # The last boundary has come
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begins,
                "on_header_begin": self._header_begins,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_ends,
                "on_headers_finished": self._head_ends,
                "on_part_data": self._content,
                "on_end": self._form_ends,
            },
            max_header_count=_HEADERS_MAX,
            max_header_size=_HEADER_BYTES_MAX,
        )

    def feed(self, data: bytes) -> list[Part | bytes]:
        """Parts, and pieces of the content of the last one. Raises `ApiError` (400)."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            message = f"The body is not valid multipart/form-data: {str(error)[:200]}."
            raise bad_value(None, message, "invalid_multipart") from None
        found, self._found = self._found, []
        return found

    # --- called by the parser; those that it calls several times get data in pieces ----------------------------------------

    def _part_begins(self) -> None:
        self._parts += 1
        if self._parts > _PARTS_MAX:
            raise bad_value(None, f"The form has more than {_PARTS_MAX} parts.", "invalid_multipart")
        self._disposition = b""

    def _header_begins(self) -> None:
        self._header = self._value = b""

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_ends(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value

    def _head_ends(self) -> None:
        self._found.append(_part(self._disposition))

    def _content(self, data: bytes, start: int, end: int) -> None:
        self._found.append(data[start:end])

    def _form_ends(self) -> None:
        self.is_complete = True


def _part(disposition: bytes) -> Part:
    """Raises `ApiError`."""
    if disposition.count(b";") > _PARAMETERS_MAX:
        raise bad_value(None, f"A part of the body has more than {_PARAMETERS_MAX} parameters.", "invalid_multipart")
    # RFC 7578 forbids `filename*=`, and the parser skips it. Clients with urllib3 1 write names so that are not ASCII.
    before, found, after = disposition.partition(b"filename*=")
    if found and not _in_quotes(before):
        disposition = before + b"encoded=" + after
    kind, options = parse_options_header(disposition)
    name, filename = options.get(b"name"), options.get(b"filename")
    charset, _, encoded = options.get(b"encoded", b"").partition(b"'")
    if charset.lower() == b"utf-8":
        filename = unquote_to_bytes(encoded.partition(b"'")[2])
    if kind != b"form-data" or name is None:
        raise bad_value(None, "A part of the body has no name.", "invalid_multipart")
    return Part(_text(name), None if filename is None else _text(filename))


def _in_quotes(before: bytes) -> bool:
    """Whether what follows `before` is inside a quoted string."""
    return before.replace(b"\\\\", b"").replace(b'\\"', b"").count(b'"') % 2 == 1


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")[:_NAME_CHARS_MAX]
