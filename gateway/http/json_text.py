"""Parses JSON from clients. The memory that its values need is estimated before it is decoded.

One call of the decoder keeps all other threads waiting until it returns, the event loop's included. 8 MB of `{},{},…` would
take it 0.15 s and 180 MiB. Long strings are cheap, but each value has a cost, so the number of values is bounded. The number
of floats that may be near the limits of a float, like 1e308, is bounded too: the decoder takes up to 15 µs for one.
"""

import codecs
from typing import Any, Final

import msgspec

from gateway.http.errors import ApiError, bad_value

VALUES_BYTES_MAX: Final = 48 << 20  # 1.5 million token ids, 600,000 strings or 100,000 fields of objects
_SLICE_BYTES: Final = 64 << 10
_VALUE_BYTES: Final = 32
_QUOTE_BYTES: Final = 24  # The memory of a string without its characters, counted half for each of its two quotes
_OBJECT_BYTES: Final = 160  # The memory of an object or list
_FIELD_BYTES: Final = 400  # The cost of a field beside its name: more than its memory, for the time that decoding takes
_FRACTION_BYTES: Final = 40  # The cost of a decimal point, for the time that decoding its number takes
_SLOW_NUMBER_BYTES: Final = VALUES_BYTES_MAX // 2_000  # a number with an exponent or very many digits
_LONG_DIGITS: Final = 256
_ALL_DIGITS_ALIKE: Final = bytes.maketrans(b"123456789.", b"0000000000")


def values_bytes(text: bytes) -> int:
    """Returns about how many bytes of memory the values of a JSON text take, without the characters of its strings. If the
    text is valid JSON, the contents of strings are never counted as values."""
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
            + _FIELD_BYTES * outside.count(b":")
            + _OBJECT_BYTES * (outside.count(b"{") + outside.count(b"["))
            + _FRACTION_BYTES * outside.count(b".")
            + _QUOTE_BYTES * (len(pieces) - 1)
            + _SLOW_NUMBER_BYTES * _slow_numbers(outside)
        )
    return total


def _slow_numbers(text: bytes) -> int:
    exponents = text.count(b"e") + text.count(b"E") - text.count(b"true") - text.count(b"false")
    return max(exponents, 0) + text.translate(_ALL_DIGITS_ALIKE).count(b"0" * _LONG_DIGITS)


def parse_json(body: bytes) -> Any:
    """Strict JSON: no NaN or Infinity, no lone surrogates, bounded depth and number of values. Raises `ApiError` (400, 413)."""
    if values_bytes(body) > VALUES_BYTES_MAX:
        message = "The body has too many values, or too many numbers with exponents or hundreds of digits."
        raise ApiError(413, message, code="request_too_large")
    try:
        return msgspec.json.decode(body.removeprefix(codecs.BOM_UTF8))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise bad_value(None, f"The body is not valid JSON: {str(error)[:200]}.", "invalid_json") from None


def parse_inner(text: str) -> Any:
    """Parse JSON that is the text of a string in a body, within the same bounds as a body. Raises `ValueError`."""
    try:
        return parse_json(text.encode())
    except ApiError as error:
        raise ValueError(error.message) from None
