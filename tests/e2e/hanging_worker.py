"""A worker of the role named in $HANG_ROLE, whose compute thread hangs in its next step once the file $HANG_WHEN exists, as in
a driver that never returns, or fails in it if the file says "fail". Started by a test in place of `python -m decode_worker`;
nothing in the product knows of it."""

import os
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

from runtime.process.exits import leave
from runtime.settings.command_line import run_role
from runtime.settings.workers import WorkerSettings


def run(settings: WorkerSettings) -> int:
    driver = import_module(f"{settings.role}_worker.worker")
    run_step = driver.run_step

    def hangs(*arguments: Any) -> Any:
        if (when := Path(os.environ["HANG_WHEN"])).exists():
            if when.read_text() == "fail":
                raise RuntimeError("a planted fault of the model")
            threading.Event().wait()
        return run_step(*arguments)

    driver.run_step = hangs  # type: ignore[attr-defined]
    status: int = import_module("worker.process").run_worker(settings)
    return status


if __name__ == "__main__":
    leave(run_role("worker", WorkerSettings, run, fixed={"role": os.environ["HANG_ROLE"]}))
