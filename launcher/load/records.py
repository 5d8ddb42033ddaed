"""The records of requests that were sent, and of a whole run, as written to a file."""

from pathlib import Path
from typing import Any, Final

import msgspec

from runtime.settings.options import SettingsError

FORMAT: Final = 1
OK: Final = "ok"
CANCELLED: Final = "cancelled"
INTERRUPTED: Final = "interrupted"  # the run ended before the request did
NOT_SENT: Final = "not_sent"  # too many requests were in flight already
FILE_BYTES_MAX: Final = 1 << 30


class RequestRecord(msgspec.Struct):
    """One request. Times are seconds since the run began."""

    index: int
    tenant: str
    due_s: float
    prompt_asked: int
    output_asked: int
    counted: bool = True  # false in the warm-up
    sent_s: float = 0.0
    first_s: float | None = None
    gaps_ms: list[float] = []  # between chunks with tokens
    tail_ms: float = 0.0
    """Time from the last chunk with tokens to a chunk that only ends the answer; the last token came with that one if it has
    no text."""
    ended_s: float = 0.0
    tokens: int = 0  # of the answer, as the server counts them, or else chunks with tokens
    prompt_tokens: int = 0  # as the server counts them; 0 if it did not say
    cached_tokens: int = 0
    outcome: str = INTERRUPTED  # ok, cancelled (by this client, as planned), or the kind of error
    detail: str = ""
    retry_after_s: float | None = None
    request_id: str = ""
    queue_ms: float | None = None  # in the coordinator's queue, from its event log
    priority: str = ""

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first_s is None else 1000 * (self.first_s - self.sent_s)

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per token after the first one. Tokens in the first chunk beyond the first one count as sent after it."""
        spent_ms = sum(self.gaps_ms) + self.tail_ms
        return spent_ms / (self.tokens - 1) if self.tokens > 1 and spent_ms else None

    @property
    def e2e_ms(self) -> float:
        return 1000 * (self.ended_s - self.sent_s)


class RunFile(msgspec.Struct):
    """The output of `--json`."""

    format: int
    settings: dict[str, Any]
    about: dict[str, Any]  # versions, machine, model, when
    tenants: dict[str, float]  # their weights
    figures: dict[str, Any]
    requests: list[RequestRecord]


def encoded(run: RunFile | dict[str, Any]) -> str:
    """Returns a run, or several, as one line of JSON."""
    return msgspec.json.encode(run).decode() + "\n"


def read(path: str) -> RunFile:
    """Raises `SettingsError` naming the file."""
    file = Path(path).expanduser()
    try:
        if file.stat().st_size > FILE_BYTES_MAX:
            raise SettingsError(f"{path}: larger than {FILE_BYTES_MAX} bytes")
        run = msgspec.json.decode(file.read_bytes(), type=RunFile)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise SettingsError(f"{path}: not a file of crossdock bench serve --json: {error}") from None
    if run.format != FORMAT:
        raise SettingsError(f"{path}: of format {run.format}; this version reads {FORMAT}")
    return run
