"""The lock file of a usage ledger, whose holder is the coordinator that serves (`leader_lock`)."""

import os
from pathlib import Path
from typing import Final

_NETWORK: Final = frozenset(
    "9p afs beegfs ceph cifs coda fhgfs gfs gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs panfs pvfs2 smb2 smb3"
    " smbfs".split()
)
_LOCAL_FUSE: Final = frozenset({"fuse.fuse-overlayfs", "fuse.gocryptfs", "fuse.ntfs-3g"})


def lock_of(usage_db: str) -> Path:
    return Path(f"{usage_db}.lock").expanduser()


def open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at this path: it may have been removed or replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def network_file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Returns the type of the network file system that this path is on, or "" if it is local or not known. Raises
    `OSError`."""
    device = path.stat().st_dev
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        kind = after.partition(" ")[0]
        network = kind in _NETWORK or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE)
        if network and before.split()[2] == f"{os.major(device)}:{os.minor(device)}":
            return kind
    return ""
