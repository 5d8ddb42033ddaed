"""The workers that come back on a new connection. Pure.

The gateway may see the end of a connection long before the worker does. A worker that was paused or cut off goes on sending on
the old connection, and these messages are lost. They may include the end of a stream that began meanwhile. So a reconnection
counts as one more loss.
"""

from collections import OrderedDict
from typing import Final

_REMEMBERED_MAX: Final = 1024


class WorkerLinks:
    def __init__(self) -> None:
        self._ended: OrderedDict[int, None] = OrderedDict()  # workers, the latest last

    def down(self, incarnation: int) -> None:
        self._ended.pop(incarnation, None)
        self._ended[incarnation] = None
        if len(self._ended) > _REMEMBERED_MAX:
            self._ended.popitem(last=False)

    def returns(self, incarnation: int) -> bool:
        """Note that the worker is connected. Returns whether an earlier connection of it has ended."""
        return self._ended.pop(incarnation, 0) is None
