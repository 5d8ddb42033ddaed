"""How answers are written: JSON without any character that a client could take for the end of a line."""

from typing import Any, Final

import msgspec
from starlette.responses import JSONResponse

_LINE_BREAKS: Final = ((b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"), (b"\xc2\x85", rb"\u0085"))
"""Those of Unicode that JSON itself does not escape."""
KEEP_ALIVE: Final = b": keep-alive\n\n"
"""A comment, which clients of server-sent events ignore."""


def encode(content: Any) -> bytes:
    data = msgspec.json.encode(content)
    if not data.isascii():
        # Many clients read server-sent events by lines, and split those as Unicode does.
        for character, escape in _LINE_BREAKS:
            data = data.replace(character, escape)
    return data


class JsonResponse(JSONResponse):
    def render(self, content: Any) -> bytes:
        return encode(content)
