"""The prefill workers that are asked for a step after an event, and why. Pure.

`placement.schedule` asks a worker only where something has happened that may let it compute. Each event that can make it ask
is a method here.

**Invariant**, after `schedule`: take a prefill worker that can be given a step, and a queue key that it may take from: its own
key, the key of what is bound to it, or a demand class. If something waits there, one of these holds:

- `closed` has the key: a request of this class found no room in decode, and no decode worker has let go of enough since;
- `stuck` has the key for this worker: a request found no room there, or no decode worker that it may send to, and nothing
  has been let go of since;
- the worker takes no new requests (`may_place_on`);
- `schedule` ended early, and `for_all` is set for the next event.

So each event that ends one of these conditions lets workers be asked: a single one (`ready`), or all that can take a step
(`for_all`).
"""

from collections.abc import Callable, Iterable, Mapping

from scheduler.request import Request
from scheduler.waiting.queue import WaitQueue
from scheduler.waiting.queue_keys import bound_key
from scheduler.workers.reserved_workers import RoomForLargeRequest
from scheduler.workers.worker import Ordered, Worker


class Wakeups:
    def __init__(self, workers: Mapping[int, Worker], room_for_large: RoomForLargeRequest) -> None:
        """`workers`: of both roles."""
        self._workers, self._room_for_large = workers, room_for_large
        self.idle = Ordered()
        """Prefill workers that can be given a step, the one with the least to do first; of equals, the one that has done
        least."""
        self.takes_chunks: set[int] = set()  # decode workers that can be given a chunk of what is bound to them
        self.for_all = False  # any of the prefill workers may find something
        self.ready: dict[int, None] = {}  # workers that may find work of their own, placed on them or bound to them
        self.closed: dict[int, Request] = {}  # classes without room in decode, each with the request that found none
        self.stuck: dict[int, dict[int, Request]] = {}
        """The keys under which nothing can be placed on a prefill worker, each with the request that found no room. A worker
        without a sequence free is here too, maybe without a key."""
        self._found_nothing: set[int] = set()  # workers that were asked in vain at the event in hand
        self._gave_up = False
        self.go_on_at_once = False  # there is more to do than one event may take: a `Tick` is due now

    # --- what happens ---------------------------------------------------------------------------------------------------

    def request_came(self) -> None:
        """Note that a request waits in its demand class, newly or again."""
        self.for_all = True

    def came_back(self) -> None:
        """Note that a request that was bound to a worker waits in its demand class again. Workers that found nothing are asked
        again. This ends, because a request is bound only a limited number of times."""
        self.for_all = True
        self._found_nothing.clear()

    def may_go_out_of_turn(self) -> None:
        """There may be room for a request that does not wait for its turn: see `placement.schedule`."""
        self.for_all = True

    def steps_changed(self, worker: Worker) -> None:
        """A prefill worker has more or less to do, or a decode worker more or fewer suffixes to compute."""
        can_take = worker.pace.may_have_more(len(worker.steps), worker.tokens_in_flight)
        if not can_take:
            self.ready.pop(worker.incarnation, None)
        if worker.is_decode:
            (self.takes_chunks.add if can_take else self.takes_chunks.discard)(worker.incarnation)
        elif can_take:
            self.idle.put(worker.incarnation, worker.tokens_in_flight, worker.tokens_forwarded)
        else:
            self.idle.drop(worker.incarnation)

    def has_own_work(self, worker: Worker) -> None:
        """Note that a worker has done a step, or that a request was placed on it or bound to it."""
        if worker.incarnation in self.idle or worker.incarnation in self.takes_chunks:
            self.ready[worker.incarnation] = None

    def prefill_room_freed(self, worker: Worker) -> None:
        if self.stuck.pop(worker.incarnation, None) is not None:
            self.has_own_work(worker)

    def decode_room_freed(self, fits: Callable[[Request], bool]) -> None:
        """`fits` says whether a request has room on the decode worker that has let go of something."""
        found: dict[str, bool] = {}
        for key, request in list(self.closed.items()):
            if request.id not in found:
                found[request.id] = not request.waits or fits(request)
            if found[request.id]:
                del self.closed[key]
                self.for_all = True

    def waits_no_more(self, request: Request) -> None:
        """Open the classes that this request closed, since the next request of its class may have room."""
        for key in [key for key, first in self.closed.items() if first is request]:
            del self.closed[key]
            self.for_all = True

    def pairs_changed(self) -> None:
        """Note that a prefill worker may send to other decode workers than before. Some workers have only bound requests, and
        `for_all` does not reach them."""
        self.for_all = self.for_all or bool(self.stuck)
        self.ready.update((incarnation, None) for incarnation in self.stuck if incarnation in self.idle)
        self.stuck.clear()

    def look_anew(self) -> None:
        """Let all workers be asked, after workers came, left, changed whether they take work, or may be paired again."""
        self.closed.clear()
        self.pairs_changed()
        self.for_all = True

    def left(self, worker: Worker) -> None:
        """It is gone."""
        self.idle.drop(worker.incarnation)
        self.takes_chunks.discard(worker.incarnation)
        self.ready.pop(worker.incarnation, None)

    # --- what `schedule` finds ------------------------------------------------------------------------------------------

    def no_room_in_decode(self, request: Request, classes: Iterable[int]) -> None:
        self.closed.update(dict.fromkeys(classes, request))

    def no_room_on(self, worker: Worker, key: int, request: Request) -> None:
        self.stuck.setdefault(worker.incarnation, {})[key] = request

    def found_nothing(self, worker: Worker) -> None:
        self.ready.pop(worker.incarnation, None)
        self._found_nothing.add(worker.incarnation)

    def gave_up(self) -> None:
        """A turn ended though there may be more to find: the next event goes on with that."""
        self._gave_up = True

    def steps_max_reached(self) -> None:
        """Stop at the bound for one event. The next event goes on, and is due at once."""
        self._gave_up = self.go_on_at_once = True

    def nothing_waits(self) -> None:
        self.for_all = self.go_on_at_once = False
        self.ready.clear()

    def event_done(self) -> None:
        self.for_all, self._gave_up = self._gave_up, False
        self._found_nothing.clear()

    # --- who is asked, and for what -------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        return self.for_all or bool(self.ready)

    @property
    def asked_in_vain(self) -> bool:
        """Whether a worker was asked at this event and found nothing."""
        return bool(self._found_nothing)

    def next_to_ask(self, queue: WaitQueue) -> Worker | None:
        """The worker with the least to do, of those that may find something."""
        if self.for_all:
            classes = {key for key in queue.classes() if key not in self.closed}
            for incarnation in self.idle if classes else ():
                if incarnation in self._found_nothing:
                    continue
                worker = self._workers[incarnation]
                stuck = self.stuck.get(incarnation)
                if self.may_place_on(worker) and not (stuck and stuck.keys() >= classes):
                    return worker
            self.for_all = False
        ready = [self._workers[incarnation] for incarnation in self.ready]
        return min(ready, key=lambda w: (w.tokens_in_flight, w.tokens_forwarded, w.incarnation), default=None)

    def may_place_on(self, prefill: Worker) -> bool:
        """Whether it takes requests that are not placed. One without a sequence free is asked as soon as it lets go of one."""
        if prefill.free_seqs <= 0:
            self.stuck.setdefault(prefill.incarnation, {})
            return False
        return not prefill.draining and prefill.incarnation != self._room_for_large.prefill

    def open_keys(self, prefill: Worker, queue: WaitQueue) -> list[int]:
        """The queue keys from which this prefill worker may take something now, its own first."""
        own = prefill.incarnation
        if prefill.is_decode:
            return [own, bound_key(own)]
        if not self.may_place_on(prefill):
            return [own]
        closed, stuck = self.closed, self.stuck.get(own, ())
        keys = (bound_key(own), *queue.classes())
        return [own, *(key for key in keys if key not in closed and key not in stuck)]
