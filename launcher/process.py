"""How this program starts its own modules and other commands."""

import os
import re
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from runtime.process import clock

ROOT = str(Path(__file__).resolve().parents[1])
_LINE_END = re.compile(rb"[\r\n]+")
_KEPT_LINES = 50


WORKER_MODULES = {"prefill": "prefill_worker", "decode": "decode_worker", "mixed": "worker"}


def python_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Returns a command that runs the module. `-P` prevents that a folder of the same name in the working directory is run
    instead."""
    return (sys.executable, "-P", "-m", module, *arguments)


STREAMED_COPIES = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=524288"}
"""Settings for a process that sends KV: copies of 512 KiB and more bypass the caches. Another process reads the copy, and a
store that does not read its target first saves a third of the memory traffic. Only glibc on x86 knows the setting; others
ignore it."""


def child_environment(threads: int, *, sends_kv: bool = False) -> dict[str, str]:
    """Returns our own environment with that of a role."""
    paths = [ROOT, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    chosen = {name: os.environ[name] for name in STREAMED_COPIES if name in os.environ}
    return (
        os.environ
        | role_environment(threads, sends_kv=sends_kv)
        | chosen
        | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    )


def role_environment(threads: int, *, sends_kv: bool = False) -> dict[str, str]:
    """Returns variables for `threads` CPU threads that sleep while they wait. Spinning threads would take the cores from other
    workers."""
    return (STREAMED_COPIES if sends_kv else {}) | {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }


def run_lines(command: Sequence[str], on_line: Callable[[str], None], *, timeout_s: float) -> tuple[int, list[str]]:
    """Run a command to its end; `on_line` gets what it prints, progress bars included, line by line.

    Returns its status and last lines. The command is killed if this call ends early. Raises `TimeoutError`.
    """
    deadline = clock.now() + timeout_s
    tail: deque[str] = deque(maxlen=_KEPT_LINES)
    environment = child_environment(len(os.sched_getaffinity(0)))
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            for line in _lines(process.stdout.fileno(), deadline):
                tail.append(line)
                on_line(line)
            return process.wait(timeout=max(0.0, deadline - clock.now())), list(tail)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{command[0]} ran over {timeout_s:.0f} s") from None
        finally:
            process.kill()


def _lines(descriptor: int, deadline: float) -> Iterator[str]:
    carry = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, deadline - clock.now())):
                raise TimeoutError("a command took too long")
            data = os.read(descriptor, 1 << 16)
            if not data:
                break
            *lines, carry = _LINE_END.split(carry + data)
            yield from (line.decode("utf-8", "replace").strip() for line in lines if line.strip())
    if carry.strip():
        yield carry.decode("utf-8", "replace").strip()
