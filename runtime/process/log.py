"""Logs: structlog, for people on a terminal and as JSON lines elsewhere. No prompt, no key and no token ids in them."""

import logging
import os
import sys
from types import TracebackType
from typing import Any

import structlog

from runtime.storage.background_writer import BackgroundWriter

Log = structlog.stdlib.BoundLogger


def configure(*, level: str, fmt: str, process: str) -> Log:
    """Set the process's logging up and return its logger.

    `fmt` is `console`, `json`, or `auto` (console if standard error is a terminal). Records of other libraries go the same
    way, from warnings up.
    """
    as_json = fmt == "json" or (fmt == "auto" and not sys.stderr.isatty())

    def name_process(_logger: Any, _method: str, event: Any) -> Any:
        event["process"] = process
        return event

    shared: list[Any] = [
        name_process,
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    # structlog's own choice for a console, rich, shows local variables: prompts and keys.
    console = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
    )
    renderer: Any = structlog.processors.JSONRenderer() if as_json else console
    last = [structlog.processors.format_exc_info, renderer] if as_json else [renderer]
    handler = _Handler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
        )
    )
    sys.excepthook = _log_uncaught
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("crossdock").setLevel(level.upper())
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    return get("crossdock")


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Log an uncaught error in line with the other records. Python's own hook writes to standard error piece by piece, between
    the lines of the log's thread, and waits for its reader."""
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        get("crossdock.log").critical("bug", exc_info=(kind, error, trace))


class _Handler(logging.Handler):
    """Writes to standard error. It never waits for what reads it: a pipe, a terminal or the journal's socket."""

    def __init__(self) -> None:
        super().__init__()
        self._writer = BackgroundWriter(_write, note=self._note)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.put(self.format(record).encode("utf-8", "backslashreplace") + b"\n")
        except Exception:  # noqa: BLE001 - as every handler of the standard library: a bad line ends nothing
            self.handleError(record)

    def flush(self) -> None:
        """Wait as `BackgroundWriter.flush` does. `logging.shutdown` calls it."""
        self._writer.flush()

    def _note(self, count: int) -> bytes:
        text = "log lines were dropped, since they could not be written"
        fields = {
            "name": "crossdock.log",
            "levelno": logging.WARNING,
            "levelname": "WARNING",
            "msg": f"{text}: {count}",
        }
        return self.format(logging.makeLogRecord(fields)).encode() + b"\n"


def _write(data: bytes) -> None:
    """Not by `sys.stderr`, whose lock would then be held while the reader stands still."""
    while data:
        data = data[os.write(2, data) :]


def get(name: str) -> Log:
    """A logger; `name` starts with `crossdock`."""
    logger: Log = structlog.get_logger(name)
    return logger
