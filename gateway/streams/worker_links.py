"""The workers that come back on a new connection. Pure.

A connection may end for the gateway long before its worker knows: one that was stopped, or cut off, goes on sending on the old
one, and what it sends is lost, the end of a stream perhaps that began meanwhile. So a return counts as one more loss.
"""

from collections import OrderedDict
from typing import Final

_REMEMBERED_MAX: Final = 1024


class WorkerLinks:
    def __init__(self) -> None:
        self._ended: OrderedDict[int, None] = OrderedDict()
        """Incarnations of workers whose connection has ended, the latest last."""

    def down(self, incarnation: int) -> None:
        self._ended.pop(incarnation, None)
        self._ended[incarnation] = None
        if len(self._ended) > _REMEMBERED_MAX:
            self._ended.popitem(last=False)

    def returns(self, incarnation: int) -> bool:
        """It is connected; whether it was before."""
        return self._ended.pop(incarnation, 0) is None
