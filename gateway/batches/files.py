"""Uploaded files and files of results, in the store. Each function is (part of) one transaction; a file is found by its own
tenant alone. Uploaded files are kept as lines, results as one row for each line of their batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.batches.store import Database, insert, new_id
from gateway.http.errors import ApiError, bad_value

FILE_COST_BYTES: Final = 16 << 10  # of each file and each batch, besides its content; this bounds their number, too
_LINES_AT_ONCE: Final = 5_000  # that are read, however small
UPLOAD_S: Final = 3600  # Seconds. An upload that has not ended by then was cut off because its gateway was killed.
Line = tuple[int, bool, bytes]  # Its number, whether it is a request (or blank), and its bytes with the end of the line


@dataclass(frozen=True)
class File:
    id: str
    tenant: str
    name: str
    is_ready: bool
    batch_id: str | None
    is_errors: bool
    bytes: int
    created_s: int
    expires_s: int

    def shown(self) -> dict[str, Any]:
        """As OpenAI has it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.name,
            "purpose": "batch" if self.batch_id is None else "batch_output",
            "status": "processed",
        }


def held_bytes(db: Database, tenant: str) -> int:
    """All that a tenant has in the store."""
    sums = "SELECT CAST(COALESCE(SUM(bytes + ?), 0) AS BIGINT) FROM files WHERE tenant = ?"
    files: int = db.execute(sums, (FILE_COST_BYTES, tenant)).fetchone()[0]
    batches: int = db.execute("SELECT COUNT(*) FROM batches WHERE tenant = ?", (tenant,)).fetchone()[0]
    return files + batches * FILE_COST_BYTES


def check_room(db: Database, tenant: str, more: int, most: int) -> None:
    """Raises `ApiError`."""
    if held_bytes(db, tenant) + more > most:
        message = (
            f"Your files and batches would take more than the {most} bytes allowed: delete files that are done with."
        )
        raise ApiError(403, message, code="storage_quota_exceeded")


def begin(db: Database, tenant: str, name: str, now: float, most: int) -> str:
    """A file that is being uploaded. Raises `ApiError`."""
    check_room(db, tenant, FILE_COST_BYTES, most)
    file_id = f"file-{new_id(now)}"
    times = {"created_s": int(now), "expires_s": int(now) + UPLOAD_S}
    insert(db, "files", id=file_id, tenant=tenant, name=name, is_ready=False, **times)
    return file_id


def append(db: Database, tenant: str, file_id: str, lines: Sequence[Line], most: int) -> None:
    """Raises `ApiError`."""
    size = sum(len(data) for _, _, data in lines)
    check_room(db, tenant, size, most)
    db.executemany("INSERT INTO lines VALUES (?, ?, ?, ?)", ((file_id, *line) for line in lines))
    db.execute("UPDATE files SET bytes = bytes + ? WHERE id = ?", (size, file_id))


def end(db: Database, tenant: str, file_id: str, expires_s: int) -> File:
    """The upload is complete. Raises `ApiError`."""
    db.execute("UPDATE files SET is_ready = TRUE, expires_s = ? WHERE id = ?", (expires_s, file_id))
    return get(db, tenant, file_id)


def get(db: Database, tenant: str, file_id: str, param: str = "file_id") -> File:
    """Raises `ApiError`."""
    row = db.execute("SELECT * FROM files WHERE id = ? AND tenant = ? AND is_ready", (file_id, tenant)).fetchone()
    if row is None:
        raise ApiError(404, f"There is no file {file_id[:100]!r}.", code="file_not_found", param=param)
    return File(*row)


def listed(db: Database, tenant: str, after: str, limit: int, newest_first: bool, purpose: str) -> list[File]:
    """Up to `limit` files behind the one with the id `after`. Raises `ApiError`."""
    way, order = ("<", "DESC") if newest_first else (">", "ASC")
    start = f"AND id {way} ?" if after else ""
    values = [tenant, get(db, tenant, after, "after").id] if after else [tenant]
    kind = {"batch": "AND batch_id IS NULL", "batch_output": "AND batch_id IS NOT NULL"}.get(purpose, "")
    if purpose and not kind:
        raise bad_value("purpose", "Invalid value for 'purpose': it must be 'batch' or 'batch_output'.")
    query = f"SELECT * FROM files WHERE tenant = ? AND is_ready {start} {kind} ORDER BY id {order}"
    return [File(*row) for row in db.execute(f"{query} LIMIT ?", (*values, limit))]


def delete(db: Database, tenant: str, file_id: str) -> None:
    """Raises `ApiError`: also where a batch that has not ended still needs it."""
    file = get(db, tenant, file_id)
    needed = "SELECT id FROM batches WHERE tenant = ? AND ended_s IS NULL AND input_file_id = ?"
    if batch := db.execute(needed, (tenant, file_id)).fetchone():
        message = f"The batch {batch[0]} still needs this file; cancel it first."
        raise ApiError(409, message, code="file_in_use", param="file_id")
    discard(db, file)


def discard(db: Database, file: File) -> None:
    if file.batch_id is not None:
        db.execute("DELETE FROM results WHERE batch_id = ? AND is_error = ?", (file.batch_id, file.is_errors))
    db.execute("DELETE FROM lines WHERE file_id = ?", (file.id,))
    db.execute("DELETE FROM files WHERE id = ?", (file.id,))


def give_up(db: Database, file_id: str) -> None:
    """An upload failed."""
    db.execute("DELETE FROM lines WHERE file_id = ?", (file_id,))
    db.execute("DELETE FROM files WHERE id = ? AND NOT is_ready", (file_id,))


def content(db: Database, file: File, after: int, bytes_most: int) -> tuple[int, bytes]:
    """Returns the number of the last line read, and the lines after the line `after`, up to about `bytes_most` bytes. If the
    number equals `after`, no lines are left."""
    if file.batch_id is None:
        found = read_lines(db, "lines WHERE file_id = ?", (file.id,), after, bytes_most)
    else:
        source = "results WHERE batch_id = ? AND is_error = ?"
        found = read_lines(db, source, (file.batch_id, file.is_errors), after, bytes_most)
    return found[-1][0] if found else after, b"".join(data for _, data in found)


def read_lines(
    db: Database, source: str, values: tuple[Any, ...], after: int, bytes_most: int
) -> list[tuple[int, bytes]]:
    """Numbers and bytes of lines after the line `after`, up to about `bytes_most` bytes. `source`: a table and a condition."""
    sizes = f"SELECT number, LENGTH(data) FROM {source} AND number > ? ORDER BY number LIMIT ?"
    last, size = after, 0
    for number, length in db.execute(sizes, (*values, after, _LINES_AT_ONCE)):
        last, size = number, size + length
        if size >= bytes_most:
            break
    found = f"SELECT number, data FROM {source} AND number > ? AND number <= ? ORDER BY number"
    return [(number, data) for number, data in db.execute(found, (*values, after, last))]


def prune(db: Database, now: int, most: int) -> int:
    """Delete files that have expired, `most` at the most, unless a batch that has not ended needs them; returns how many."""
    expired = db.execute(
        "SELECT * FROM files WHERE expires_s < ? AND (is_ready OR batch_id IS NULL) AND id NOT IN"
        " (SELECT input_file_id FROM batches WHERE ended_s IS NULL) ORDER BY expires_s LIMIT ?",
        (now, most),
    ).fetchall()
    for row in expired:
        discard(db, File(*row))
    return len(expired)
