"""Renames parameters in errors of the chat core to those of the API that is built on it."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from gateway.http.errors import ApiError

Names = Mapping[str, str]  # regular expressions of the chat core's parameters → prefixes of the API's own


@contextmanager
def renamed(names: Names) -> Iterator[None]:
    """Has an `ApiError` name the client's own parameter. The first of `names` that matches counts."""
    try:
        yield
    except ApiError as error:
        param = error.param or ""
        for pattern, own in names.items():
            changed, found = re.subn(rf"^{pattern}(?![A-Za-z0-9_])", own, param)
            if found:
                error.param, error.message = changed, error.message.replace(f"'{param}'", f"'{changed}'")
                break
        raise
