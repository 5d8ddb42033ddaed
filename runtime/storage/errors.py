"""What files and databases raise."""

from proto.errors import CrossdockError


class StorageError(CrossdockError):
    """What is stored cannot be opened, read or written; `str()` says why."""


class StorageUnavailable(StorageError):
    """The storage does not answer, or not now: another try may succeed."""
