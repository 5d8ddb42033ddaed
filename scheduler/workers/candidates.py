"""The workers of a pool that are compared for a request, without a look at all of them. Pure.

Prefill workers are kept in the order in which they would be done with a prompt, decode workers in the order of how full they
are, and both by prefix. So a decision looks at a few workers, however many there are; where there are few, it looks at all.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from proto.messages import Role, Submit
from scheduler.request import Request
from scheduler.workers.prefix_index import Locality, hashes_per_block
from scheduler.workers.token_targets import TokenTargets
from scheduler.workers.worker import DecodeWorker, Ordered, PrefillWorker, Worker

EXAMINED_MAX = 8  # workers of each side that are compared for one request; where there are no more, all of them
_LEAST_FULL, _HOLDERS, _ALIKE = 4, 4, 4
"""Where there are more: so many of the least full decode workers, so many that have the prompt's beginning, and so many that
run only streams with the same target."""
_USUAL_TOKENS = 1024.0


class Candidates:
    def __init__(
        self,
        prefill: Mapping[int, PrefillWorker],
        decode: Mapping[int, DecodeWorker],
        locality: Locality,
        targets: TokenTargets,
    ) -> None:
        self._prefill, self._decode, self._locality, self._targets = prefill, decode, locality, targets
        self.block_sizes: list[int] = []  # block sizes of all workers
        self._finish = Ordered()  # prefill workers, ordered by when each would finish a prompt of usual length
        self._least_full = Ordered()
        """Decode workers that take work and have a sequence free; of equals, the one that was chosen longest ago."""
        self._stamp = 0

    def prefill_changed(self, worker: PrefillWorker, tokens_per_s: float) -> None:
        if worker.draining:
            self._finish.drop(worker.incarnation)
        else:
            done_s = (worker.tokens_before + _USUAL_TOKENS) / tokens_per_s
            self._finish.put(worker.incarnation, done_s, worker.tokens_forwarded)

    def decode_changed(self, worker: DecodeWorker) -> None:
        if worker.draining or worker.free_seqs <= 0:
            self._least_full.drop(worker.incarnation)
        else:
            self._stamp += 1
            self._least_full.put(worker.incarnation, worker.admission.wholes - worker.capacity.kv_blocks, self._stamp)

    def left(self, worker: Worker) -> None:
        self._finish.drop(worker.incarnation)
        self._least_full.drop(worker.incarnation)

    def first_to_finish(self) -> list[PrefillWorker]:
        """A few prefill workers that would be done first with a prompt that came to them now."""
        return [self._prefill[incarnation] for incarnation in islice(self._finish, EXAMINED_MAX)]

    def least_full(self) -> DecodeWorker | None:
        """The decode worker with the fewest KV blocks taken, of those that take work and have a sequence free."""
        incarnation = next(iter(self._least_full), None)
        return self._decode[incarnation] if incarnation is not None else None

    def holders(self, submit: Submit) -> list[Worker]:
        """Workers that have a beginning of a prompt; those with the longest first, but no more than a few of each role."""
        return [*self.prefill_holders(submit), *self.decode_holders(submit)]

    def prefill_holders(self, submit: Submit) -> list[PrefillWorker]:
        few = len(self._prefill) <= EXAMINED_MAX
        return [self._prefill[one] for one in (self._prefill if few else self._holders(Role.PREFILL, submit))]

    def decode_holders(self, submit: Submit) -> list[DecodeWorker]:
        few = len(self._decode) <= EXAMINED_MAX
        return [self._decode[one] for one in (self._decode if few else self._holders(Role.DECODE, submit))]

    def _holders(self, role: Role, submit: Submit) -> Iterator[int]:
        for size in self.block_sizes:
            if every := hashes_per_block(submit, size):
                yield from self._locality.holders(role, submit.block_hashes, every, _HOLDERS)

    def decode(self, request: Request, takes: Callable[[DecodeWorker], bool]) -> list[DecodeWorker]:
        """The least full decode workers and those that have the prompt's beginning or only streams with the same target; where
        there are few, all. Only those that `takes` allows."""
        if len(self._decode) <= EXAMINED_MAX:
            return [worker for worker in self._decode.values() if takes(worker)]
        holders = self.decode_holders(request.submit)
        holders += [self._decode[incarnation] for incarnation in self._targets.alike(request, _ALIKE)]
        found = {worker.incarnation: worker for worker in holders if takes(worker)}
        looked = 0
        for incarnation in self._least_full:
            worker = self._decode[incarnation]
            if worker.free_seqs >= request.submit.choices and takes(worker):
                found[incarnation] = worker
                looked += 1
                if looked == _LEAST_FULL:
                    break
        return list(found.values())
