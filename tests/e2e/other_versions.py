"""Trees of code that speak another protocol version: a next one, made from this tree, and the previous one, from git."""

import ast
import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

from proto.limits import PROTOCOL_VERSION
from tests.e2e.parts import ROOT
from tests.proto.schema import current, file_of

NEXT_FIELD = "    from_the_next_version: tuple[int, ...] = (1, 2)\n"
NEW_REASON = '    LEFT = "left_early"\n'
NOVEL = '\n\nclass Novel(Message, frozen=True):\n    """Unknown to this version."""\n\n    text: str = "new"\n'
IGNORE_NOVEL = """

_read = read


def read(frames, version):
    message, blob = _read(frames, version)
    return (None, b"") if type(message).__name__ == "Novel" else (message, blob)
"""


def make_next(tree: Path) -> Path:
    """A copy of this tree that speaks the next version: each structure on the wire has one more field, each end of a link sends
    a new message, and a gateway cancels for a new reason."""
    for package in ROOT.glob("*/__init__.py"):
        if package.parent.name != "tests":
            shutil.copytree(package.parent, tree / package.parent.name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (tree / "proto").glob("*.py"):
        if path.name != "versions.py":
            path.write_text(_with_one_more_field(path.read_text("utf-8")), "utf-8")
    edit(
        tree / "proto/limits.py",
        f"\nPROTOCOL_VERSION = {PROTOCOL_VERSION}\n",
        f"\nPROTOCOL_VERSION = {PROTOCOL_VERSION + 1}\n",
    )
    edit(
        tree / "proto/errors.py",
        '    DISCONNECTED = "disconnected"\n',
        f'    DISCONNECTED = "disconnected"\n{NEW_REASON}',
    )
    reasons = 0
    for path in (tree / "gateway").rglob("*.py"):
        text = path.read_text("utf-8")
        reasons += text.count("CancelReason.DISCONNECTED")
        path.write_text(text.replace("CancelReason.DISCONNECTED", "CancelReason.LEFT"), "utf-8")
    assert reasons, "the gateway cancels for this reason"
    for path, addition in ((tree / "proto/messages.py", NOVEL), (tree / "proto/versions.py", IGNORE_NOVEL)):
        path.write_text(path.read_text("utf-8") + addition, "utf-8")
    link = tree / "runtime/link/server.py"
    edit(link, "import Bye, Hello, Message, ", "import Bye, Hello, Message, Novel, ")
    edit(link, "        self._on_up(peer)\n", "        peer.send(Novel())\n        self._on_up(peer)\n")
    client_up = "        self._on_up(self._peer, message)\n"
    client = tree / "runtime/link/client.py"
    edit(client, "import Bye, Hello, Ping, ", "import Bye, Hello, Novel, Ping, ")
    edit(client, client_up, f"        self._peer.send(Novel())\n{client_up}")
    return tree


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert text.count(old) == 1, f"{path.name} does not have {old!r} once: adapt {__name__}"
    path.write_text(text.replace(old, new), "utf-8")


def _with_one_more_field(source: str) -> str:
    """Append a field with a default to each message, and each structure inside of one."""
    lines = source.splitlines(keepends=True)
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.ClassDef) and node.name != "Message":
            bases = {ast.unparse(base) for base in node.bases}
            if bases & {"Message", "msgspec.Struct"}:
                lines.insert(node.end_lineno or 0, NEXT_FIELD)
    return "".join(lines)


def _git(*arguments: str) -> bytes | None:
    """What git prints, or None where it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, timeout=60, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def previous_commit() -> str:
    """The last commit, if its messages are those of this tree; otherwise empty."""
    schema = _git("show", f"HEAD~1:tests/proto/{file_of(PROTOCOL_VERSION).name}")
    return "HEAD~1" if schema is not None and json.loads(schema) == current() else ""


def extract(commit: str, tree: Path) -> Path:
    archive = _git("archive", "--format=tar", commit)
    assert archive is not None, commit
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(tree, filter="data")
    return tree
