"""The workers that serve one model, and what is reserved on them.

Memory on workers is reserved in three ways. An *allocation* (`Worker.allocations`) is what an attempt has on a worker; it
lasts until the worker says that it has let go. A *retained allocation* (`Pool.retained`) passes from an attempt on a decode
worker to its request when the prefill worker is lost, so that no other request takes the room before the next attempt. It
lasts until the request is placed or ends. A *drain for a large request* (`RoomForLargeRequest`) has no blocks: it closes one
worker to all requests but one that was bypassed too often, until that one fits there. The first two are counted in blocks, the
third is not.
"""

from collections import Counter
from collections.abc import Collection
from math import inf

from proto.messages import Role, Submit
from proto.parts import STALL_SHARE, Capacity
from scheduler.fairness.held_shares import HeldShares
from scheduler.kv_admission.admission import Key
from scheduler.kv_admission.sessions import Sessions
from scheduler.limits import Weights
from scheduler.request import RETAINED, Request
from scheduler.step_times import StepLimits, StepPace
from scheduler.waiting.answer_lengths import AnswerLengths
from scheduler.waiting.queue_keys import target_class
from scheduler.waiting.rates import Rate
from scheduler.workers.bindings import Bindings, PrefixWaits
from scheduler.workers.candidates import Candidates
from scheduler.workers.circuit_breakers import NOBODY, Breakers
from scheduler.workers.hand_overs import HandOvers
from scheduler.workers.prefix_index import Locality, known_blocks, usable_tokens
from scheduler.workers.reserved_workers import RoomForLargeRequest
from scheduler.workers.token_targets import TokenTargets
from scheduler.workers.traffic import RecentTraffic
from scheduler.workers.trials import Trials
from scheduler.workers.wakeups import Wakeups
from scheduler.workers.worker import DecodeWorker, Ordered, PrefillWorker, Worker

TOKENS_PER_S = 1000.0  # the rate that a prefill worker is taken to have, while none of its pool has been measured

HEADROOM = 1 / 16
"""The part of each decode worker that tenants with more than their share leave free. So others find room at once, and do not
take and give back the same room over and over. Where no tenant has clearly less than another, nothing is left free."""

SHORT_S = 1.0  # decode counts as short of room for so long after a request found none

SLICE_SHARE = 0.5
"""The part of a target per token that a mixed worker's prompts may take. Its decode step takes the rest."""

REASSIGN_S = 0.5  # the least time between two looks at whether a decode worker is to serve another target

APART_S = 5.0  # seconds for which targets count as what requests wait for, after one has

MEASURE_AFTER = 200  # after so many requests of a pool have finished, an idle decode worker counts as not measured

BESIDE_STREAMS = STALL_SHARE / (1 + STALL_SHARE)
"""Part of its time that a decode worker with streams has for prompts, while its rate is not measured."""


class Pool:
    """`admission` accepts only workers between which KV can cross. Callers report a changed worker: `changed`, `freed`."""

    def __init__(self, model: str, weights: Weights | None = None, steps: StepLimits | None = None) -> None:
        self.model = model
        self.weights = weights or Weights()
        self._step_limits = steps or StepLimits()
        self.workers: dict[int, Worker] = {}  # of both roles
        self.prefill: dict[int, PrefillWorker] = {}
        self.decode: dict[int, DecodeWorker] = {}
        self.locality, self.targets = Locality(), TokenTargets(self.decode)
        self.candidates = Candidates(self.prefill, self.decode, self.locality, self.targets)
        self.room_for_large = RoomForLargeRequest(self.decode)
        self.trials = Trials(self.decode)
        self.wakeups = Wakeups(self.workers, self.room_for_large)
        self.bindings = Bindings(self.prefill, self.workers, self.wakeups)
        self.breakers = Breakers()
        self.shares, self.lengths = HeldShares(), AnswerLengths()
        self.waits = PrefixWaits()
        self.hand_overs = HandOvers(self.weights.transfer_s, self.weights.transfer_s + self.weights.remote_s)
        self.suspects: dict[str, Request] = {}  # those with a suspicion, by id
        self.retained: dict[str, Request] = {}
        """Those that lost their prefill worker and keep their room in decode, by id."""
        self.paused: dict[str, Request] = {}
        """Turns that wait until the caches have room for their conversations, by id, oldest first: see `paused_turns`."""
        self.resumes_at = self.turn_came_at = 0.0
        """When the next of them resumes at the latest, and when the last turn came that was not paused."""
        self.looked_at = self._short_at = -inf
        """When streams that could give way were last looked for, and when decode was last short of room."""
        self.gives_way: list[tuple[str, int]] = []  # the attempts that were interrupted last so that others have room
        self._reassigned_at = self._targets_short_at = -inf
        self.traffic, self.sessions = RecentTraffic(), Sessions()
        self._cache_tokens = {Role.PREFILL: 0, Role.DECODE: 0}
        self.context_tokens = 0  # the longest prompt + output every worker takes, or took before all were lost
        self._lost: dict[Role, tuple[Worker, float]] = {}
        """The last worker of each role that has none now, and when it was lost. A drained worker is not lost."""
        self._freed: Rate | None = None  # millionths of a decode worker that come free by themselves
        self._tokens_per_s, self._measured = 0.0, 0
        """The sum of the measured rates of prefill workers, and their number."""
        self._by_rate = Ordered()
        """Prefill workers that take prompts and were measured with full steps, the fastest first."""
        self.no_room = self.cache_waits = 0
        """How many turns passed a request over, without room for it or because another worker has more of it cached."""
        self._mixed: dict[tuple[str, int, str], PrefillWorker] = {}  # prefill halves of mixed workers
        self.step_ends: Counter[str] = Counter()  # prefill steps by `StepEnd`
        self.finished = 0  # requests
        self.eligible_for: tuple[frozenset[Capacity], ...] | None = None
        """The `capacities` with which the waiting requests were last checked."""

    def add(self, worker: Worker) -> None:
        self.workers[worker.incarnation] = worker
        if isinstance(worker, DecodeWorker):
            self.decode[worker.incarnation], worker.shares = worker, self.shares
        else:
            self.prefill[worker.incarnation] = worker
            if worker.hello.process:
                self._mixed[_process(worker)] = worker
        self._lost.pop(worker.hello.role, None)
        blocks = worker.capacity.kv_blocks + worker.capacity.tier_blocks
        self.locality.join(worker.incarnation, blocks, worker.hello.role)
        self._count_cache(worker, blocks)
        worker.on_change = self.changed
        limits = self._step_limits
        worker.pace = StepPace(limits._replace(tokens=limits.tokens or worker.capacity.step_tokens))
        self.changed(worker)
        self.wakeups.look_anew()
        self._measure()

    def remove(self, worker: Worker, now: float) -> None:
        side = self.decode if worker.is_decode else self.prefill
        del side[worker.incarnation], self.workers[worker.incarnation]
        if self._mixed.get(_process(worker)) is worker:
            del self._mixed[_process(worker)]
        if not side and not worker.draining:
            self._lost[worker.hello.role] = worker, now
        self.locality.leave(worker.incarnation)
        self._count_cache(worker, -worker.capacity.kv_blocks - worker.capacity.tier_blocks)
        self.breakers.leave(worker.incarnation)
        self.wakeups.left(worker)
        self.bindings.hosts.pop(worker.incarnation, None)
        self.candidates.left(worker)
        self._by_rate.drop(worker.incarnation)
        self.hand_overs.leave(worker.incarnation)
        if isinstance(worker, DecodeWorker):
            self.targets.leave(worker)
            for key, allocation in worker.allocations.items():
                if allocation.path:
                    self.shares.remove(allocation.path, worker.incarnation, key)
            worker.shares = None
        self.wakeups.look_anew()
        self._measure()

    def is_short(self, now: float) -> bool:
        """Whether a request has lately found no room in decode."""
        if self.wakeups.closed:
            self._short_at = now
        return now - self._short_at <= SHORT_S

    def _count_cache(self, worker: Worker, blocks: int) -> None:
        """Count a worker's cache. A session lies in both roles, so the larger of the two is the room for sessions."""
        self._cache_tokens[worker.hello.role] += blocks * worker.capacity.block_size
        self.sessions.kv_tokens = max(self._cache_tokens.values())

    def freed_per_s(self, now: float) -> float:
        """Millionths of a decode worker that came free lately, not counting streams that gave way."""
        if self._freed is None:
            self._freed = Rate(now)
        self._freed.add(self.shares.freed, now)
        self.shares.freed = 0
        return self._freed.per_s(now)

    def changed(self, worker: Worker) -> None:
        """Update all orders after a worker's allocations, its work, or whether it takes work have changed."""
        if isinstance(worker, PrefillWorker):
            self.candidates.prefill_changed(worker, self.rate(worker))
            if worker.has_run_full and not worker.draining:
                self._by_rate.put(worker.incarnation, -worker.tokens_per_s, 0.0)
            else:
                self._by_rate.drop(worker.incarnation)
            self.wakeups.steps_changed(worker)
        else:
            self.targets.changed(worker)
            self.candidates.decode_changed(worker)
            if worker.capacity.computes_suffixes:
                self.wakeups.steps_changed(worker)
            if worker.hello.process:
                self._bound_slices(worker)

    def measure_mixed(self, decode: DecodeWorker, steps: int, sequences: float, step_ms: float) -> None:
        """Record the mean of some decode steps of a mixed worker, prompts between them included."""
        prefill = self._mixed.get(_process(decode))
        if prefill is None:
            return
        between_ms = max(prefill.prompts_ms - decode.prompts_seen_ms, 0.0) / steps
        decode.prompts_seen_ms = prefill.prompts_ms
        if step_ms > between_ms:
            decode.step_fit.add(sequences, step_ms - between_ms)
            self._bound_slices(decode)

    def stream_begins(self, decode: Worker, key: Key) -> None:
        """An attempt whose KV a decode worker has got takes part in its steps."""
        assert isinstance(decode, DecodeWorker)
        decode.streams.add(key)
        self._bound_slices(decode)

    def _bound_slices(self, decode: DecodeWorker) -> None:
        """Set how long a mixed worker's decode half gives way to its prefill half: each stream keeps its target, or without one
        its part of a step. Nothing bounds a prompt that is alone there: it has a place in decode, but no stream runs."""
        prefill = self._mixed.get(_process(decode)) if decode.hello.process else None
        if prefill is not None:
            step_ms = decode.step_fit.step_ms(decode.capacity.max_seqs - decode.free_seqs)
            targets = decode.seqs_by_target if decode.streams or len(decode.allocations) > 1 else ()
            bounds = (SLICE_SHARE * ms if ms else STALL_SHARE * step_ms for ms in targets)
            prefill.pace.slice_ms = min(filter(None, bounds), default=0.0)

    def freed(self, worker: Worker) -> None:
        """Wake waiting requests, since a worker has released something or is certain to need less."""
        wakeups, drain, trials = self.wakeups, self.room_for_large, self.trials
        if not isinstance(worker, DecodeWorker):
            wakeups.prefill_room_freed(worker)
            if self.retained or trials.waiting or drain.request is not None:
                wakeups.may_go_out_of_turn()
            return
        is_kept = worker.incarnation == drain.decode
        if self.retained or trials.waiting or is_kept:
            wakeups.may_go_out_of_turn()
        if self.breakers.pairs:
            wakeups.pairs_changed()
        if wakeups.closed and not worker.draining and not is_kept:
            short = self.short_targets()

            def fits(request: Request) -> bool:
                self.lengths.expect(request, self.shares)
                return self.decode_fits(worker, request, short)

            wakeups.decode_room_freed(fits)

    # --- what may run where -------------------------------------------------------------------------------------------

    def may_pair(self, prefill: Worker, decode: DecodeWorker, now: float) -> bool:
        breakers, one, other = self.breakers, prefill.incarnation, decode.incarnation
        if not breakers.pairs:
            return True
        return (
            breakers.allows((one, other), now, lambda key: key in decode.allocations)
            and breakers.allows_worker((one, NOBODY), now, lambda key: key in prefill.allocations, len(self.prefill))
            and breakers.allows_worker((NOBODY, other), now, lambda key: key in decode.allocations, len(self.decode))
        )

    def has_pair(self, prefill: Worker, now: float) -> bool:
        """Whether the prefill worker has a decode worker to which it may send KV."""
        if isinstance(prefill, DecodeWorker):
            return not prefill.draining and self.may_pair(prefill, prefill, now)
        return any(not decode.draining and self.may_pair(prefill, decode, now) for decode in self.decode.values())

    def decode_candidates(self, request: Request, prefill: Worker, now: float) -> list[DecodeWorker]:
        """Decode workers to which this prefill worker may send: the one that keeps the request's blocks, those that run no
        other suspect for a suspect, else a few. Not one that is closed to all requests but another."""
        large = self.room_for_large

        def takes(decode: DecodeWorker) -> bool:
            closed = decode.incarnation == large.decode and request is not large.request
            return not closed and not decode.draining and self.may_pair(prefill, decode, now)

        if self.trials.concern(request, now):
            return [decode for decode in self.trials.free() if takes(decode)]
        keeps = self.keeps_room(request)
        if keeps is not None and takes(keeps):
            return [keeps]
        found = self.candidates.decode(request, takes)
        kept = self.decode.get(large.decode) if request is large.request else None
        return found if kept is None or kept in found or not takes(kept) else [*found, kept]

    def keeps_room(self, request: Request) -> DecodeWorker | None:
        """The decode worker that keeps the blocks of the request's last attempt, and has released that attempt."""
        retained = request.attempt_progress.retained
        decode = self.decode.get(retained.decode_incarnation) if retained is not None else None
        return decode if decode is not None and (request.id, RETAINED) in decode.allocations else None

    def returning(self) -> list[Request]:
        """Requests that lost their prefill worker and kept their room in decode. They have had their turn."""
        waiting = (request for request in self.retained.values() if request.waits and request.entry is not None)
        return [request for request in waiting if self.keeps_room(request) is not None]

    def large_request(self, now: float) -> list[Request]:
        """The request that was bypassed too often, once the decode worker that is kept for it has room."""
        large, decode = self.room_for_large, self.decode.get(self.room_for_large.decode)
        request = large.request
        if request is None:
            return []
        if decode is None or decode.draining or not self.could_place(request.submit):
            large.end()  # no tenant pays for this
            self.wakeups.look_anew()
            return []
        if not self.decode_fits(decode, request):
            return []
        if not large.prefill and not any(worker.fits(request.submit) for worker in self.prefill.values()):
            large.keep_prefill(w for w in self.prefill.values() if self.may_pair(w, decode, now))
        return [request]

    def starts_at_once(self, worker: Worker) -> bool:
        """Whether something placed on a prefill worker is in its next step, which it can be given now."""
        if worker.incarnation not in self.wakeups.idle or worker.undispatched:
            return False
        return self.wakeups.may_place_on(worker) and not self.breakers.concern(worker.incarnation)

    def end_trial(self, request: Request) -> None:
        """End a suspect's trial in decode, or its wait for one."""
        if self.trials.end(request):
            self.wakeups.may_go_out_of_turn()

    def decode_fits(
        self, decode: DecodeWorker, request: Request, short: Collection[int] = (), without: Collection[Key] = ()
    ) -> bool:
        """Whether a decode worker has room for a request now, or when the streams in `without` are gone, and no target is
        missed there for it. `short`: the result of `short_targets`."""
        kept = request.id, RETAINED
        if kept in decode.allocations:
            return decode.fits(request.submit, request.expected_left, (kept,))
        leaves = HEADROOM if self.shares.holds_more(request.path) else 0.0
        if not decode.fits(request.submit, request.expected_left, without, leaves=leaves):
            return False
        choices = request.submit.choices - sum(decode.allocations[key].seqs for key in without)
        return not self.targets.used or choices <= self.targets.free_seqs(decode, request, short)

    def short_targets(self) -> Collection[int]:
        """Classes of targets of which something waits though a decode worker has a sequence and blocks for it."""
        short = dict[int, None]()
        roomiest = self.candidates.least_full() if self.targets.used and self.wakeups.closed else None
        if roomiest is not None:
            for first in self.wakeups.closed.values():
                target = target_class(first.tpot_ms)
                if target not in short and first.waits and roomiest.fits(first.submit, first.expected_left):
                    short[target] = None
        return short

    def reassign(self, now: float) -> None:
        """Give a decode worker to a class of targets that waits without room. Called often; not each call looks."""
        if now < self._reassigned_at + REASSIGN_S or not self.wakeups.closed:
            return
        self._reassigned_at, short = now, self.short_targets()
        if short:
            self._targets_short_at = now
            worker = self.targets.reassign(short)
            if worker is not None:
                self.freed(worker)

    def is_apart(self, tpot_ms: float, now: float) -> bool:
        """Whether a class of targets has decode workers of its own, and targets are what requests wait for, or did lately."""
        return now - self._targets_short_at <= APART_S and self.targets.has_own(tpot_ms)

    def token_s(self, decode: DecodeWorker) -> float:
        """How long a decode worker's streams wait for each token; 0: not known, or to be measured anew with one stream."""
        is_known = decode.allocations or self.finished - decode.measured_at < MEASURE_AFTER
        return decode.token_ms / 1000 if is_known else 0.0

    # --- what is cached ---------------------------------------------------------------------------------------------------

    def cached_tokens(self, submit: Submit, worker: Worker) -> int:
        """Returns how many prompt tokens a worker is believed to have cached, counting only those that save work."""
        if not submit.block_hashes:
            return 0
        size = worker.capacity.block_size
        return usable_tokens(known_blocks(self.locality, worker.incarnation, submit, size), submit, size)

    def uncached_tokens(self, submit: Submit) -> int:
        """Returns how many prompt tokens the best prefill worker is believed to have to compute."""
        holders = self.candidates.prefill_holders(submit) if submit.block_hashes else ()
        return submit.prompt_tokens - max((self.cached_tokens(submit, worker) for worker in holders), default=0)

    def missing_blocks(self, submit: Submit, decode: DecodeWorker) -> int:
        """Returns how many of a prompt's blocks a decode worker is believed not to have."""
        size = decode.capacity.block_size
        return -(-submit.prompt_tokens // size) - known_blocks(self.locality, decode.incarnation, submit, size)

    # --- all workers together -------------------------------------------------------------------------------------------

    def hash_block_size(self) -> int:
        """Tokens that one hash of a prompt covers: the smallest block size, of which all others are multiples."""
        return min(worker.capacity.block_size for worker in self.workers.values())

    def servable(self) -> bool:
        """Whether workers of both roles take new work."""
        return not self.lacks()

    def lacks(self) -> str:
        """The reason why it takes no new work; empty where there is none."""
        for role, side in self._sides():
            if not side:
                return f"no {role} worker is up"
            if all(worker.draining for worker in side):
                return f"every {role} worker is draining"
        return ""

    def awaits_restart(self, now: float, within_s: float) -> bool:
        """Whether each role has workers that take new work, or lost its last one at most `within_s` ago. The supervisor
        of that process is about to start it again."""
        for role, side in self._sides():
            if any(not worker.draining for worker in side):
                continue
            if side or role not in self._lost or now >= self._lost[role][1] + within_s:
                return False
        return True

    def measure(self, worker: Worker, tokens: int, step_ms: float) -> None:
        """A prefill step of so many tokens has been computed."""
        before = worker.tokens_per_s
        worker.measure(tokens, step_ms)
        self.changed(worker)
        if not worker.is_decode:
            self._measured += not before
            self._tokens_per_s += worker.tokens_per_s - before

    def rate(self, prefill: Worker) -> float:
        """Returns prompt tokens per second. An unmeasured worker counts as the mean prefill worker, and an unmeasured decode
        worker with streams as `BESIDE_STREAMS` of it."""
        if prefill.tokens_per_s:
            return prefill.tokens_per_s
        mean = self._tokens_per_s / self._measured if self._measured else TOKENS_PER_S
        return mean * BESIDE_STREAMS if prefill.is_decode and prefill.allocations else mean

    def tokens_per_s(self) -> float:
        """Prefill rate of all workers together; 0 until something was measured. Those that were not measured count as the
        mean of the others."""
        return self._tokens_per_s * len(self.prefill) / self._measured if self._measured else 0.0

    def fastest_tokens_per_s(self) -> float:
        """The highest rate that was measured with full steps, of workers that take prompts; 0 where there is none."""
        return -self._by_rate.least() if len(self._by_rate) else 0.0

    def least_prefill_s(self, tokens: int) -> float:
        """Returns the least time in which a worker computes `tokens` of one prompt after its steps in flight. An unmeasured
        worker counts as the fastest; 0 if none is measured."""
        fastest = self.fastest_tokens_per_s()
        if not fastest:
            return 0.0
        takers = self.candidates.first_to_finish()
        return min((w.tokens_in_flight + tokens) / (w.tokens_per_s if w.has_run_full else fastest) for w in takers)

    def capacities(self) -> tuple[frozenset[Capacity], ...]:
        """Returns the capacities of prefill and decode workers that take work. They alone decide what can run at all."""
        return tuple(frozenset(w.capacity for w in side if not w.draining) for _, side in self._sides())

    def could_place(self, submit: Submit) -> bool:
        """Whether it could run on workers that take work, if nothing else was there."""
        return all(any(not w.draining and w.could_ever_take(submit) for w in side) for _, side in self._sides())

    def could_ever_fit(self, submit: Submit) -> bool:
        """Whether it fits workers that are up. If a role has none, its last lost worker stands for the worker that will be
        started again."""
        for role, side in self._sides():
            workers = side or (self._lost[role][0],)
            if not any(worker.could_ever_take(submit) for worker in workers):
                return False
        return True

    def _sides(self) -> tuple[tuple[Role, Collection[Worker]], ...]:
        return (Role.PREFILL, self.prefill.values()), (Role.DECODE, self.decode.values())

    def _measure(self) -> None:
        both = self.workers.values()
        self.context_tokens = min((worker.capacity.context_tokens for worker in both), default=self.context_tokens)
        self.candidates.block_sizes = sorted({worker.capacity.block_size for worker in both})
        rates = [worker.tokens_per_s for worker in self.prefill.values() if worker.tokens_per_s]
        self._tokens_per_s, self._measured = sum(rates), len(rates)


def _process(worker: Worker) -> tuple[str, int, str]:
    return worker.hello.host, worker.hello.pid, worker.hello.process
