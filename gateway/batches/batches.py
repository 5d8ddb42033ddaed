"""Batches, their lines and their results, in the store. Each function runs in one transaction, or is a part of one. Clients
find only the batches of their own tenant."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from gateway.batches import files
from gateway.batches.lines import parse_line, unanswered
from gateway.batches.store import Database, insert, new_id
from gateway.batches.types import CreateBatchRequest, window_h
from gateway.http.errors import ApiError

OPEN_MAX: Final = 100  # Batches of one tenant that have not ended
AT_ONCE: Final = 4  # Batches of one tenant that run at the same time: its oldest
_OPEN: Final = """
SELECT * FROM batches AS one WHERE ended_s IS NULL AND ? >
(SELECT COUNT(*) FROM batches WHERE tenant = one.tenant AND ended_s IS NULL AND id < one.id) ORDER BY id
"""
_LEFT: Final = """
SELECT number FROM lines WHERE file_id = ? AND is_request
AND NOT EXISTS (SELECT 1 FROM results WHERE batch_id = ? AND number = lines.number) ORDER BY number
"""
_PUT: Final = """
INSERT INTO results SELECT id, ?, ?, ? FROM batches WHERE id = ? AND status IN ('in_progress', 'cancelling')
ON CONFLICT DO NOTHING
"""


@dataclass(frozen=True)
class Batch:
    id: str
    tenant: str
    input_file_id: str
    endpoint: str
    completion_window: str
    status: str
    metadata: bytes
    errors: bytes
    created_s: int
    expires_s: int
    started_s: int | None
    cancelling_s: int | None
    ended_s: int | None
    keep_s: int
    total: int
    completed: int
    failed: int
    output_file_id: str | None
    error_file_id: str | None

    def shown(self) -> dict[str, Any]:
        """As OpenAI has it."""

        def ended(status: str) -> int | None:
            return self.ended_s if self.status == status else None

        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": msgspec.json.decode(self.errors),
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id if self.ended_s is not None else None,
            "error_file_id": self.error_file_id if self.ended_s is not None else None,
            "created_at": self.created_s,
            "in_progress_at": self.started_s,
            "expires_at": self.expires_s,
            "finalizing_at": ended("completed"),
            "completed_at": ended("completed"),
            "failed_at": ended("failed"),
            "expired_at": ended("expired"),
            "cancelling_at": self.cancelling_s,
            "cancelled_at": ended("cancelled"),
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": msgspec.json.decode(self.metadata),
        }


def create(db: Database, tenant: str, wanted: CreateBatchRequest, keep_s: int, now: float, most: int) -> Batch:
    """Raises `ApiError`."""
    file = files.get(db, tenant, wanted.input_file_id, "input_file_id")
    if file.batch_id is not None:
        message = "The file has the results of a batch; a batch needs a file with the purpose 'batch'."
        raise ApiError(400, message, code="invalid_purpose", param="input_file_id")
    files.check_room(db, tenant, 3 * files.FILE_COST_BYTES, most)
    count = "SELECT COUNT(*) FROM batches WHERE tenant = ? AND ended_s IS NULL"
    if db.execute(count, (tenant,)).fetchone()[0] >= OPEN_MAX:
        message = f"You have {OPEN_MAX} batches that have not ended, and may have no more."
        raise ApiError(429, message, code="too_many_batches", retry_after_s=60.0)
    token, created_s = new_id(now), int(now)
    batch_id, results = f"batch_{token}", (f"file-{token}-output", f"file-{token}-errors")
    expires_s = created_s + window_h(wanted.completion_window) * 3600
    insert(
        db,
        "batches",
        id=batch_id,
        tenant=tenant,
        **wanted.model_dump(include={"input_file_id", "endpoint", "completion_window"}),
        status="validating",
        metadata=msgspec.json.encode(wanted.metadata),
        created_s=created_s,
        expires_s=expires_s,
        keep_s=keep_s,
        output_file_id=results[0],
        error_file_id=results[1],
    )
    for is_errors, file_id in zip((False, True), results, strict=True):
        name, until_s = f"{batch_id}_{'errors' if is_errors else 'output'}.jsonl", expires_s + keep_s
        of_batch = {"tenant": tenant, "batch_id": batch_id, "is_errors": is_errors, "is_ready": False}
        insert(db, "files", id=file_id, name=name, created_s=created_s, expires_s=until_s, **of_batch)
    return get(db, tenant, batch_id)


def get(db: Database, tenant: str, batch_id: str, param: str = "batch_id") -> Batch:
    """Raises `ApiError`."""
    row = db.execute("SELECT * FROM batches WHERE id = ? AND tenant = ?", (batch_id, tenant)).fetchone()
    if row is None:
        raise ApiError(404, f"There is no batch {batch_id[:100]!r}.", code="batch_not_found", param=param)
    return Batch(*row)


def listed(db: Database, tenant: str, after: str, limit: int) -> list[Batch]:
    """Returns up to `limit` batches, the newest first, that follow the batch with the id `after`. Raises `ApiError`."""
    start = "AND id < ?" if after else ""
    values = [tenant, get(db, tenant, after, "after").id] if after else [tenant]
    query = f"SELECT * FROM batches WHERE tenant = ? {start} ORDER BY id DESC LIMIT ?"
    return [Batch(*row) for row in db.execute(query, (*values, limit))]


def cancel(db: Database, tenant: str, batch_id: str, now: int) -> Batch:
    """Cancel a batch: it ends without the lines that have not begun. Raises `ApiError` if it has already ended."""
    batch = get(db, tenant, batch_id)
    if batch.ended_s is not None:
        message = f"The batch is {batch.status} and can no longer be cancelled."
        raise ApiError(409, message, code="batch_has_ended", param="batch_id")
    if batch.status != "cancelling":
        db.execute("UPDATE batches SET status = 'cancelling', cancelling_s = ? WHERE id = ?", (now, batch_id))
    return get(db, tenant, batch_id)


# --- for the runner ---------------------------------------------------------------------------------------------------


def open_batches(db: Database) -> list[Batch]:
    """Those of all tenants that are to be worked on."""
    return [Batch(*row) for row in db.execute(_OPEN, (AT_ONCE,))]


def input_lines(db: Database, batch: Batch, after: int, bytes_most: int) -> list[tuple[int, bytes]]:
    """Its requests behind the line `after`, up to about so many bytes."""
    source = "lines WHERE file_id = ? AND is_request"
    return files.read_lines(db, source, (batch.input_file_id,), after, bytes_most)


def start(db: Database, batch: Batch, total: int, now: int) -> None:
    """Start a batch whose lines are all valid."""
    db.execute(
        "UPDATE batches SET status = 'in_progress', started_s = ?, total = ? WHERE id = ? AND status = 'validating'",
        (now, total, batch.id),
    )


def refuse(db: Database, batch: Batch, errors: Sequence[dict[str, Any]], now: int) -> None:
    """End a batch as failed because lines of it are invalid."""
    shown = msgspec.json.encode({"object": "list", "data": list(errors)})
    db.execute("UPDATE batches SET errors = ? WHERE id = ?", (shown, batch.id))
    finish(db, batch, "failed", now)


def lines_left(db: Database, batch: Batch) -> list[int]:
    """Numbers of the lines without a result."""
    return [row[0] for row in db.execute(_LEFT, (batch.input_file_id, batch.id))]


def line(db: Database, batch: Batch, number: int) -> tuple[bytes, int]:
    """One line, and how many bytes its tenant has in the store."""
    query = "SELECT data FROM lines WHERE file_id = ? AND number = ?"
    data: bytes = db.execute(query, (batch.input_file_id, number)).fetchone()[0]
    return data, files.held_bytes(db, batch.tenant)


def put_result(db: Database, batch: Batch, number: int, is_error: bool, data: bytes) -> bool:
    """Write a line's result. Returns whether it was written: a line keeps its first result, and an ended batch gets no
    more."""
    if not db.execute(_PUT, (number, is_error, data, batch.id)).rowcount:
        return False
    column, file_id = ("failed", batch.error_file_id) if is_error else ("completed", batch.output_file_id)
    db.execute(f"UPDATE batches SET {column} = {column} + 1 WHERE id = ?", (batch.id,))
    db.execute("UPDATE files SET bytes = bytes + ? WHERE id = ?", (len(data), file_id))
    return True


def expire_lines(db: Database, batch: Batch, most: int) -> int:
    """Lines that have not run get a result that says so, `most` at the most; returns how many."""
    message = "The completion window of the batch ended before this request had run."
    numbers = [row[0] for row in db.execute(f"{_LEFT} LIMIT ?", (batch.input_file_id, batch.id, most))]
    for number in numbers:
        custom_id = parse_line(line(db, batch, number)[0]).custom_id
        told = unanswered(f"batch_req_{batch.id[6:]}-{number}", custom_id, "batch_expired", message)
        put_result(db, batch, number, True, told)
    return len(numbers)


def finish(db: Database, batch: Batch, status: str, now: int) -> None:
    """End a batch and make its results readable. Result files without any results are deleted."""
    db.execute(
        "UPDATE files SET is_ready = TRUE, created_s = ?, expires_s = ? WHERE batch_id = ? AND bytes > 0",
        (now, now + batch.keep_s, batch.id),
    )
    db.execute("DELETE FROM files WHERE batch_id = ? AND bytes = 0", (batch.id,))
    db.execute(
        "UPDATE batches SET status = ?, ended_s = ?, output_file_id = (SELECT id FROM files WHERE id = output_file_id),"
        " error_file_id = (SELECT id FROM files WHERE id = error_file_id) WHERE id = ? AND ended_s IS NULL",
        (status, now, batch.id),
    )


def prune(db: Database, before_s: int, most: int) -> int:
    """Delete batches that ended before then and have no file of results left, `most` at the most; returns how many."""
    query = (
        "DELETE FROM batches WHERE id IN (SELECT id FROM batches WHERE ended_s < ? AND NOT EXISTS"
        " (SELECT 1 FROM files WHERE batch_id = batches.id) LIMIT ?)"
    )
    return int(db.execute(query, (before_s, most)).rowcount)
