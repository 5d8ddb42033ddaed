"""Requests that fit a decode worker's KV pool: the coordinator's `KvAdmission`, asked only where the pool may run short.

`KvAdmission` admits everything while the whole lives of all attempts add up to less than the pool. It keeps rows only from
that point until the sum is down to half of the pool. Here too, only the sum is kept until rows are needed, and then the rows
are made.

Answers count with their whole length here, as with `--kv-overcommit 1`: with more, the cluster serves more than is predicted.
"""

from scheduler.kv_admission.admission import KvAdmission, KvDemand

_ATTEMPT = 1


class DecodeRoom:
    def __init__(self, kv_blocks: int, block_size: int) -> None:
        self.kv_blocks, self.block_size = kv_blocks, block_size
        self.kv_tokens = kv_blocks * block_size
        self.wholes = 0
        self._lives: dict[int, tuple[int, int, int, int]] = {}
        """Lives by job number, in the order of placing: prompt tokens, tokens to forward, the worker's steps when it was
        placed, and the step after which it joined, or -1."""
        self._exact: KvAdmission | None = None

    def whole(self, prompt: int, output: int) -> int:
        return -(-(prompt + output - 1) // self.block_size)

    @property
    def taken(self) -> int:
        return self.wholes if self._exact is None else self._exact.taken

    @property
    def exact(self) -> bool:
        """Whether room is counted exactly: then a sequence that joins or ends may make room for more than its own blocks."""
        return self._exact is not None

    def fits(self, prompt: int, output: int, steps: int) -> bool:
        """Whether a request fits. `steps`: steps that the worker has begun."""
        if self._exact is None:
            if self.wholes + self.whole(prompt, output) <= self.kv_blocks:
                return True
            self._exact = exact = KvAdmission(self.kv_blocks, self.block_size)
            for number, (tokens, left, placed, joined) in self._lives.items():
                key = str(number), _ATTEMPT
                exact.reached(placed)
                exact.place(key, KvDemand(tokens, left))
                if joined >= 0:
                    exact.joined(key, joined)
            exact.reached(steps)
        else:
            self._exact.reached(steps)
        return self._exact.fits(KvDemand(prompt, output - 1))

    def place(self, number: int, prompt: int, output: int, steps: int) -> None:
        self.wholes += self.whole(prompt, output)
        self._lives[number] = prompt, output - 1, steps, -1
        if self._exact is not None:
            self._exact.place((str(number), _ATTEMPT), KvDemand(prompt, output - 1))

    def joined(self, number: int, step: int) -> None:
        prompt, left, placed, _ = self._lives[number]
        self._lives[number] = prompt, left, placed, step
        if self._exact is not None:
            self._exact.joined((str(number), _ATTEMPT), step)

    def release(self, number: int) -> None:
        prompt, left, _, _ = self._lives.pop(number)
        self.wholes -= self.whole(prompt, left + 1)
        if self._exact is not None:
            self._exact.release((str(number), _ATTEMPT))
            if self.wholes * 2 <= self.kv_blocks:
                self._exact = None
