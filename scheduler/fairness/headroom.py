"""The part of each decode worker that tenants with more than their share leave free, so that others find room at once. Pure.

It is `LEAST` of a worker. It grows by `GROWTH` times what each interruption for a share took, up to `MOST`, and halves every
`HALF_LIFE_S`. So where the load of a tenant with less than its share goes up and down, others do not take and give back the
same room over and over. Where no tenant has clearly less than another, nothing is left free.
"""

LEAST, MOST = 1 / 32, 1 / 8
GROWTH = 4.0
HALF_LIFE_S = 120.0


class Headroom:
    def __init__(self) -> None:
        self.share = LEAST  # a part of each worker's sequences and blocks
        self._at = 0.0

    def pass_time(self, now: float) -> None:
        more = (self.share - LEAST) * 0.5 ** ((now - self._at) / HALF_LIFE_S)
        self.share, self._at = LEAST + more, now

    def interrupted(self, share: float) -> None:
        """Streams that held this part of all decode workers gave way to a tenant that had less than its share."""
        self.share = min(self.share + GROWTH * share, MOST)
