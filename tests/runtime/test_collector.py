"""The garbage collector rests while a process loads, and works from then on, on what came since."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from runtime.process import garbage_collector as collector


class Ring:
    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_is_loaded_is_not_looked_through_again() -> None:
    gc.collect()
    with collector.at_rest():
        assert not gc.isenabled()
        for_good = weakref.ref(Ring())
    assert gc.isenabled() and gc.get_freeze_count() > 1000
    later = weakref.ref(Ring())
    gc.collect()
    assert for_good() is not None and later() is None


def test_it_works_again_where_loading_fails() -> None:
    with pytest.raises(OSError), collector.at_rest():
        raise OSError("no such model")
    assert gc.isenabled()
