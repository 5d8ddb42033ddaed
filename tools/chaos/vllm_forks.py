"""Forks workers from a process that has imported vLLM already. Run in the Python of vLLM; reads orders from its input, as JSON
lines of [module, arguments, log], and prints "started PID" for each, and "ended PID STATUS" later.
"""

import ctypes
import importlib
import json
import os
import runpy
import selectors
import signal
import sys

from engine.vllm.order import prepare_environment

PRELOAD = (
    "worker.process",
    "prefill_worker.worker",
    "decode_worker.worker",
    "vllm",
    "engine.vllm.load",
    "engine.vllm.options",
    "engine.vllm.runner",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
)
POLL_S = 0.01
PR_SET_PDEATHSIG = 1


def become(parent: int, module: str, arguments: list[str], log: str) -> None:
    """Run a role in a forked process, until it or its parent ends."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        say("ended", pid, os.waitstatus_to_exitcode(status))


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prepare_environment()
    for name in PRELOAD:
        importlib.import_module(name)
    own_pid, carry = os.getpid(), b""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        while True:
            reap()
            if not selector.select(POLL_S):
                continue
            if not (data := os.read(0, 1 << 16)):
                return
            *lines, carry = (carry + data).split(b"\n")
            for line in lines:
                if (pid := os.fork()) == 0:
                    selector.close()
                    become(own_pid, *json.loads(line))
                    return
                say("started", pid)


if __name__ == "__main__":
    main()
