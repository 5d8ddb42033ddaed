"""A SQLite file that this user alone can read."""

import os
import stat
from pathlib import Path


def make_private(path: Path) -> None:
    """Make the file where it is missing. A file that an earlier version made readable for others becomes private. Raises
    `OSError`."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # SQLite gives the files that it makes beside this one the same mode.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is not a file")
    finally:
        os.close(descriptor)
    for each in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        if each.exists() and each.stat().st_uid == os.geteuid():
            each.chmod(0o600)
