"""The file whose lock is the turn (`leader_lock`), for whoever only wants to know whether somebody has it. Imports next to
nothing: a coordinator asks before it loads anything else."""

import fcntl
import os
from pathlib import Path


def lock_of(usage_db: str) -> Path:
    return Path(f"{usage_db}.lock").expanduser()


def open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def is_taken(usage_db: str) -> bool:
    """Whether somebody has the turn at this moment."""
    try:
        descriptor = open_lock(lock_of(usage_db))
    except OSError:
        return False  # who takes the turn says why
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
