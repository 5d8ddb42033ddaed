"""The interpreter's garbage collector. A process loads a million objects that stay for good; left alone, the collector looks
through them again and again while they come, a seventh of the CPU time of a worker's start, and once more, for a tenth of a
second, whenever a quarter as many have been made since.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def at_rest() -> Iterator[None]:
    """What is made inside is not looked through, now or later. Whatever thread makes it: the collector is the process's."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
