"""The engine thread: its own priority, and nobody else's."""

import os
import threading

from engine.thread import EngineThread


def niceness(thread_id: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread_id)


def test_only_the_engine_thread_is_niced() -> None:
    """Niceness and affinity change for the engine thread, and the main thread keeps its niceness."""
    main = threading.get_native_id()
    before = niceness(main)
    with EngineThread(threads=1, cores=tuple(os.sched_getaffinity(0))[:1]) as thread:
        engine_thread = thread.submit(threading.get_native_id).result(10)
        assert niceness(engine_thread) == before
        thread.submit(thread.be_nice, min(before + 3, 19)).result(10)
        assert niceness(engine_thread) == min(before + 3, 19)
        assert niceness(main) == before
        assert thread.submit(os.sched_getaffinity, 0).result(10) == set(tuple(os.sched_getaffinity(0))[:1])
