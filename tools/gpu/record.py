"""Where the parts of `scripts/gpu_check` put what they find: a line of JSON for each result, at once, so that a part that is
cut off leaves what it had. Without CROSSDOCK_CHECK_OUT, on standard output.

CROSSDOCK_CHECK_DEVICE=cpu runs the same code on a CPU, at tiny sizes: that shows that it runs, and nothing else.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEVICE = os.environ.get("CROSSDOCK_CHECK_DEVICE", "cuda")
ON_GPU = DEVICE != "cpu"


def record(part: str, name: str, **values: Any) -> None:
    line = json.dumps({"part": part, "name": name, **values}) + "\n"
    if path := os.environ.get("CROSSDOCK_CHECK_OUT"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(line)
    else:
        sys.stdout.write(line)
        sys.stdout.flush()


def attempt(part: str, name: str, work: Callable[[], dict[str, Any]]) -> None:
    """Records what `work` returns, or why it failed, so that the other measurements still run."""
    began = time.perf_counter()
    try:
        found = work()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        found = {"error": shortened(f"{type(error).__name__}: {error}")}
    record(part, name, **found, took_s=round(time.perf_counter() - began, 2))


def shortened(text: str) -> str:
    """Keeps the beginning of a long text, which names the error, and its end, which has the reason."""
    return text if len(text) <= 1500 else f"{text[:300]} … {text[-1200:]}"
