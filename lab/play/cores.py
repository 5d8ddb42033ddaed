"""Workers of one host that take cores or memory bandwidth from each other.

If more workers of a role are busy than they have cores, each gets an equal part (processor sharing). While workers of the
other role are busy, steps take longer by a measured factor. Each mixed worker has a core. If every core has such a worker,
requests and tokens take time from the workers. If the profile gives neither cores nor factors, nothing is shared, and this
costs no time.
"""

from collections.abc import Callable

from lab.play.batch import VirtualBatch
from lab.play.workers import PlayedPrefill
from lab.profile import Profile


class PlayedHost:
    def __init__(
        self,
        profile: Profile,
        push_step: Callable[[float, PlayedPrefill], None],
        push_end: Callable[[VirtualBatch], None],
    ) -> None:
        """`push_step`: called when the end of a worker's present step has changed. `push_end`: called when a batch's next end
        has changed."""
        self._prefill_cores, self._decode_cores = profile.prefill_cores, profile.decode_cores
        self._beside_decode, self._beside_prefill = profile.beside_decode, profile.beside_prefill
        self._beside_mixed = profile.beside_mixed
        self._shared = bool(self._prefill_cores or self._decode_cores) or (
            max(self._beside_decode, self._beside_prefill) > 1
        )
        control = profile.control
        self._step_s, self._token_s = control.step_ms / 1000, control.token_ms / 1000
        self.talks = bool(profile.prefill_cores and control.step_ms)  # requests use cores of prefill workers
        self._talking = 0
        self._tokens_want = 0.0  # cores that passing on the tokens of all decode workers would fill
        self._push_step, self._push_end = push_step, push_end
        self._cores = self._prefill_cores + self._decode_cores
        self._mixed: dict[int, VirtualBatch] = {}  # batches of mixed workers that compute
        self._running: dict[int, PlayedPrefill] = {}
        self._busy: dict[int, VirtualBatch] = {}
        self._prefill_share = 1.0

    def start(self, worker: PlayedPrefill, took_s: float, now: float) -> None:
        worker.running, worker.left_s, worker.since_s = True, took_s, now
        if not self._shared:
            self._push_step(now + took_s, worker)
            return
        self._running[worker.number] = worker
        self._retime(now, worker)

    def stop(self, worker: PlayedPrefill, now: float) -> None:
        worker.running = False
        if self._running.pop(worker.number, None) is not None:
            self._retime(now, None)

    def mixed_changed(self, batch: VirtualBatch, now: float) -> None:
        """Updates all mixed workers: this one began or ended a prefill step, or its sequences have changed."""
        if not self._shared:
            return
        self._count_tokens(batch)
        if batch.prefill_s or batch.sequences:
            self._mixed[batch.number] = batch
        else:
            self._mixed.pop(batch.number, None)
        decoding = sum(1 for other in self._mixed.values() if _decodes(other))
        for other in self._mixed.values():
            beside = self._beside_mixed if decoding - _decodes(other) else self._beside_prefill
            share = self._mixed_stretch() * (beside if len(self._mixed) > 1 else 1.0)
            if other.share != share:
                other.sync(now)
                other.share = share
                self._push_end(other)

    def mixed_slower(self, batch: VirtualBatch) -> float:
        """How many times as long a prefill step takes on this mixed worker."""
        beside = any(_decodes(other) for other in self._mixed.values() if other is not batch)
        return self._mixed_stretch() * (self._beside_decode if beside else 1.0)

    def _mixed_stretch(self) -> float:
        """Returns how many times as long steps of mixed workers take: passing on tokens uses a part of their cores."""
        if not self._cores:
            return 1.0
        return max(len(self._mixed) / max(self._cores - self._tokens_want, self._cores / 2), 1.0)

    def _count_tokens(self, batch: VirtualBatch) -> None:
        wants = 0.0
        if self.talks and batch.sequences:
            wants = (self._step_s + self._token_s * batch.sequences) / (batch.prefill_s + batch.step_s())
        self._tokens_want += wants - batch.tokens_want
        batch.tokens_want = wants

    def batch_changed(self, batch: VirtualBatch, now: float) -> None:
        """Updates the batch, whose sequences have changed, and its next end."""
        busy = batch.sequences > 0
        if batch.is_mixed:
            self.mixed_changed(batch, now)
        else:
            self._count_tokens(batch)
            if self._shared and busy != (batch.number in self._busy):
                if busy:
                    self._busy[batch.number] = batch
                else:
                    del self._busy[batch.number]
                self._retime(now, None)
        self._push_end(batch)

    def talk(self, alone_s: float, now: float) -> float:
        """Begins the passage of a request through client, gateway and coordinator, which takes `alone_s` where nothing else
        runs; returns when it ends by the present load."""
        self._talking += 1
        if self._running:
            self._retime_prefill(now, None)
        return now + alone_s * self._stretch(self._talking)

    def talked(self, now: float) -> None:
        self._talking -= 1
        if self._running:
            self._retime_prefill(now, None)

    def _stretch(self, count: int) -> float:
        return stretch(count, self._prefill_cores, len(self._busy), self._tokens_want)

    def hand_over_slower(self) -> float:
        return self._stretch(1 + self._talking + len(self._running)) if self.talks else 1.0

    def _prefill_slower(self) -> float:
        count = len(self._running)
        beside = self._beside_decode if self._busy else 1.0
        if self.talks:
            return self._stretch(count + self._talking) * beside if count else 1.0
        return _share(count, self._prefill_cores) * beside

    def _retime(self, now: float, new: PlayedPrefill | None) -> None:
        self._retime_prefill(now, new)
        share = _share(len(self._busy), self._decode_cores) * (self._beside_prefill if self._running else 1.0)
        for batch in self._busy.values():
            if batch.share != share:
                batch.sync(now)
                batch.share = share
                self._push_end(batch)

    def _retime_prefill(self, now: float, new: PlayedPrefill | None) -> None:
        share = self._prefill_slower()
        if share != self._prefill_share:
            for worker in self._running.values():
                if worker is not new:
                    worker.left_s = max(worker.left_s - (now - worker.since_s) / self._prefill_share, 0.0)
                    worker.since_s = now
                self._push_step(now + worker.left_s * share, worker)
            self._prefill_share = share
        elif new is not None:
            self._push_step(now + new.left_s * share, new)


def stretch(count: int, cores: int, batches: int, tokens_want: float) -> float:
    """Returns how many times as long each of `count` jobs takes that want one core each. They share `cores` with `batches`
    decode workers, whose tokens want `tokens_want` cores. If the cores do not suffice, each gets an equal part (max-min
    fairness)."""
    left, equal = cores - tokens_want, (count + batches) / cores
    return max(1.0, min(count / left, equal) if left > 0 else equal)


def _share(busy: int, cores: int) -> float:
    return max(1.0, busy / cores) if cores else 1.0


def _decodes(batch: VirtualBatch) -> bool:
    """Whether a mixed worker runs decode steps and no prefill step."""
    return batch.sequences > 0 and not batch.prefill_s
