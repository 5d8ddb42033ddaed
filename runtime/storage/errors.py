"""Errors of files and databases."""

from proto.errors import CrossdockError


class StorageError(CrossdockError):
    """A file or database cannot be opened, read or written; `str()` says why."""


class StorageUnavailable(StorageError):
    """The storage does not answer, or not now: another try may succeed."""
