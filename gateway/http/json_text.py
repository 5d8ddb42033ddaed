"""JSON that clients send: what its values will take in memory is known before they are made.

One call of the decoder keeps all other threads waiting until it returns, the event loop's included. 8 MB of `{},{},…` would
take it 0.15 s and 180 MiB. Texts are cheap, however long; values cost something each, so their number is bounded.
"""

from typing import Any, Final

import msgspec

from gateway.http.errors import ApiError, bad_value

VALUES_BYTES_MAX: Final = 48 << 20
"""Of a body: 1.5 million token ids, 600,000 strings or 200,000 fields of objects."""
_SLICE_BYTES: Final = 64 << 10
_VALUE_BYTES: Final = 32
_QUOTE_BYTES: Final = 24
"""Half of a string without its characters."""
_FIELD_BYTES: Final = 160
"""Also of an empty object or list."""


def values_bytes(text: bytes) -> int:
    """About what the values of a JSON text take in memory, the characters of its strings not counted. Exact as far as
    the text is JSON: what is inside of strings does not count."""
    total = in_string = 0
    carried = b""
    for at in range(0, len(text), _SLICE_BYTES):
        part = (carried + text[at : at + _SLICE_BYTES]).replace(b"\\\\", b"")
        carried = part[-1:] if part.endswith(b"\\") else b""
        if carried:  # what it escapes is in the next slice
            part = part[:-1]
        pieces = part.replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[in_string::2])
        in_string ^= (len(pieces) - 1) & 1
        total += (
            _VALUE_BYTES * outside.count(b",")
            + _FIELD_BYTES * (outside.count(b":") + outside.count(b"{") + outside.count(b"["))
            + _QUOTE_BYTES * (len(pieces) - 1)
        )
    return total


def parse_json(body: bytes) -> Any:
    """Strict JSON: no NaN or Infinity, no lone surrogates, bounded depth and number of values. Raises `ApiError` (400, 413)."""
    if values_bytes(body) > VALUES_BYTES_MAX:
        message = f"The body has too many values: they would take more than {VALUES_BYTES_MAX} bytes of memory."
        raise ApiError(413, message, code="request_too_large")
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise bad_value(None, f"The body is not valid JSON: {str(error)[:200]}.", "invalid_json") from None
