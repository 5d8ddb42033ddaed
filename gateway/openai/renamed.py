"""Errors of the chat core in the words of an API that is built on it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from gateway.http.errors import ApiError


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Has an `ApiError` name the client's own parameter: `names` has those of chat with those that they were made of."""
    try:
        yield
    except ApiError as error:
        param = error.param or ""
        for name, own in names.items():
            if param == name or param.startswith((f"{name}.", f"{name}[")):
                changed = own + param.removeprefix(name) if own != "input" else own
                message = error.message.replace(f"'{param}'", f"'{changed}'")
                raise ApiError(
                    error.status, message, code=error.code, param=changed, retry_after_s=error.retry_after_s
                ) from None
        raise
