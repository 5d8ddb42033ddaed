"""The room in one decode worker's KV pool: whether one more attempt can be taken without the pool ever running out. Pure.

Counting every attempt at its full length (prompt + max_tokens) wastes blocks that others release before it grows that long.
The peak test (as in LightLLM's scheduler: sort by remaining output, admit when the highest sum over all future steps fits)
counts what can be held *at the same time*. Here it is done in blocks, with choices that share full prompt blocks, and safe
against answers that start late and news that comes late.

**What is known.** A decode worker counts its steps. Its sequences run in lockstep: whatever is in the batch moves on by one
token with every step, without exception (a sequence that cannot is taken out), and blocks of a sequence that ended are free
before the next step takes any. So an attempt that joined after step s with a prompt of P tokens and at most `left` more to be
forwarded holds, at step t, at most

    grown(t - s) = shared + choices · (⌈(P + min(t - s, left)) / B⌉ - shared),     shared = ⌊P / B⌋

blocks while t ≤ s + left, and none later, for certain. It may hold fewer: choices end early, a prefix is shared.

**What is not known** is when an attempt that is placed (it waits, prefills, or is handed over) will join. The plain peak
formula takes them all to start now, which is not safe. B = 1: A has 2 tokens and 9 to come, C has 5 and 1 to come. Started
together they need at most max(2+1 + 5+1, 2+9) = 11; but with C 8 steps late, A holds 11 when C holds 6: 17. So of a pending
attempt only this is assumed: it joins no earlier than the step `s0` the worker had reached when it was placed, and may stay
for ever. It counts as grown(t - s0) for *every* t ≥ s0, its end never coming.

**Why that is safe.** Let T(t) be the sum of both kinds over t, and the pool be at least max T. (1) Blocks really held at step
t are at most T(t): for running ones by lockstep, for pending ones because grown does not fall and they join at s ≥ s0, so
grown(t - s) ≤ grown(t - s0); before joining they hold the prompt's blocks at most, which is grown(0). (2) T never rises but by
`place`: joining replaces grown(t - s0) for ever by grown(t - s) until s + left, which is nowhere more; an end removes a term.
And T is a function of the worker's steps alone, so time passing changes nothing. (3) News that comes late leaves an older T in
force, which by (2) is higher everywhere; and an s0 that is behind the worker's true step is smaller, hence safe. So with
`place` only after `fits`, the pool cannot run out: no refusal after prefill, no preemption, whatever the lengths, cancels,
delays and orders. It is also the tightest safe test for attempts just placed: there is a joining order that needs exactly this
maximum.

**Shared prefixes.** Attempts whose prompts begin alike hold the same full blocks. Sharing counts only after the worker has
reported it (`SharedPrefix`): the blocks that an attempt found in the worker's prefix tree, or that it brought and others may
find. From then on until it ends the attempt holds them for certain: it has a reference to each, and full blocks of prompts are
never written to. `shared_blocks` says how many of an attempt's blocks are *covered* by attempts that stay at least as long;
its term in T is less by that. (1) holds: of the attempts alive at a step, one counts each shared block; an attempt of which
the worker has said nothing counts in full; and one that ended goes on to cover others until its end is known, when its blocks
go over to them. (2) holds: naming a holder takes away from T, and when an attempt joins or ends, what it counted goes over to
others whose ends are no later. Nothing is assumed in advance. A placed request has to fit in full, and counts in full until
the worker has found its prefix, so T is right even where a prefix that it might have shared is given up before it comes.

**Overcommit** gives up this guarantee for more use: a `KvDemand` with `expected` < `left` is counted as if it ended at
`expected`. An attempt that outlives this is counted with twice the tokens from then on. `SPARE_SHARE` of the pool is left for
that, but T may still exceed the pool. Then nothing more is placed, and `preemption` chooses who leaves.

**Cost.** Between two ends T does not fall, so its maximum is at an end, or at "never" for the pending. One row per attempt,
sorted by end, carries T at that end; a change adds or subtracts one term for the rows up to its own: O(n), in a few numpy
calls. The rows are made when the full lengths add up to more than the pool, and dropped when they add up to half of it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from proto.messages import Submit
from scheduler.kv_admission.shared_blocks import SharedBlocks

NEVER = 1 << 60  # the end of an attempt without a known end, in steps


class KvDemand(NamedTuple):
    """The need of an attempt on a decode worker, in tokens; lengths are of each choice."""

    prompt_tokens: int
    left: int
    """Most tokens it will forward after joining: the last drawn token's KV is never written, hence max_tokens - 1."""
    choices: int = 1
    expected: int = NEVER  # the length that it is counted with if that is less than `left`: overcommit

    @staticmethod
    def of(submit: Submit, expected: int = NEVER) -> "KvDemand":
        new_tokens = submit.sampling.max_tokens - submit.resumed_tokens
        return KvDemand(submit.prompt_tokens, max(new_tokens - 1, 0), submit.choices, expected)

    @property
    def counted(self) -> int:
        return min(self.left, self.expected)

    def grown(self, steps: int, block_size: int) -> int:
        """Blocks held at the most `steps` steps after joining, in this and every earlier step."""
        shared = self.prompt_tokens // block_size
        tokens = self.prompt_tokens + min(max(steps, 0), self.counted)
        return shared + self.choices * (-(-tokens // block_size) - shared)

    def whole(self, block_size: int) -> int:
        """Blocks held at the end of the longest life counted with."""
        prompt_tokens, left, choices, expected = self
        shared = prompt_tokens // block_size
        return shared + choices * (-(-(prompt_tokens + min(left, expected)) // block_size) - shared)


SPARE_SHARE = 1 / 16  # the part of the pool that is left free by attempts that may outlive what they are counted with
Key = tuple[str, int]
Ints = npt.NDArray[np.int64]


_COLUMNS = _END, _CAP, _OFFSET, _CHOICES, _BASE, _TOTAL = range(6)
"""Columns of the table: the fields of `_Row`, and T at the row's end."""


class _Row(NamedTuple):
    """Blocks at a step t of now or later, up to the end: base + choices · ⌊(min(t, cap) + offset) / block_size⌋."""

    end: int
    cap: int
    offset: int
    choices: int
    base: int
    row_id: int

    def at(self, step: int, block_size: int) -> int:
        return self.base + self.choices * ((min(step, self.cap) + self.offset) // block_size)


class _Entry(NamedTuple):
    row: _Row
    whole: int  # the most it is counted with
    life: KvDemand | None  # none: adopted, only its blocks are known
    running: bool
    covered: int = 0  # its prompt's blocks that are counted with other attempts; `row` and `whole` are without them


class KvAdmission:
    """`fits`, then `place`; `joined` and `reached` as the worker tells; `release` when it holds nothing more for an attempt."""

    def __init__(self, kv_blocks: int, block_size: int) -> None:
        self.kv_blocks = kv_blocks
        self.block_size = block_size
        self.steps = 0  # steps the worker is known to have begun
        self.short = False
        """The worker has warned that blocks run short. Nothing more fits, or new attempts would take what victims free."""
        self.wholes = 0  # blocks of all attempts at their full lengths, as if no ends were known
        self.outlived: set[Key] = set()  # attempts that have outlived what they were counted with at first
        self._entries: dict[Key, _Entry] = {}
        self._has_rows = False
        self._table: Ints = np.zeros((len(_COLUMNS), 64), dtype=np.int64)
        self._ends: list[int] = []
        """The column `_END` once more, and the rows' ids: bisect on a list beats a numpy call."""
        self._ids: list[int] = []
        self._next_id = 0
        self._short: list[tuple[int, int, Key]] = []
        """A heap of running rows that may outlive their end: (end, row's id, attempt). Some are out of date."""
        self._shared = SharedBlocks()
        self._divisor = np.array(block_size)
        self._peak: int | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    @property
    def peak(self) -> int:
        """Most blocks that what is here can ever hold at the same time."""
        self._settle()
        if not self._has_rows:
            self._has_rows = True
            for entry in sorted(self._entries.values(), key=lambda entry: entry.row.end):
                self._add_row(entry.row)
        if self._peak is None:
            self._peak = int(np.maximum.reduce(self._table[_TOTAL, : len(self._ends)])) if self._ends else 0
        return self._peak

    @property
    def taken(self) -> int:
        """`peak` where it is kept, else `wholes`, which is more."""
        self._settle()
        return self.peak if self._has_rows else self.wholes

    def fits(self, life: KvDemand, without: Collection[Key] = (), *, leaves: float = 0.0) -> bool:
        """Whether this attempt can be placed so that no attempt ever lacks a block: now, or when those in `without` are gone.
        `leaves`: the part of the pool that it leaves to others beside `SPARE_SHARE`."""
        if self.short:
            return False
        self._settle()
        whole, most = life.whole(self.block_size), self.kv_blocks
        if self._entries:
            spare = SPARE_SHARE if leaves or life.counted < life.left else 0.0
            most -= int(self.kv_blocks * (spare + leaves))
        if self.wholes + whole <= most:
            return True
        if whole > most or (not without and self.peak + life.grown(0, self.block_size) > most):
            return False
        totals = self._totals(without)
        totals += self._blocks(self._row(life, self.steps, NEVER), len(totals))
        return int(np.maximum.reduce(totals, initial=whole)) <= most

    def peak_without(self, keys: Collection[Key]) -> int:
        """The value of `peak` if these attempts were gone."""
        return int(np.maximum.reduce(self._totals(keys), initial=0))

    def _totals(self, without: Collection[Key]) -> Ints:
        """T at the ends of all rows, without these attempts. Blocks that they share with others remain."""
        assert self.peak >= 0, "there are rows now"
        totals: Ints = self._table[_TOTAL, : len(self._ends)].copy()
        for key in without:
            row = self._entries[key].row
            upto = bisect_right(self._ends, row.end)
            totals[:upto] -= self._blocks(row, upto)
            if kept := self._shared.counted_for_others(key):
                totals[:upto] += kept
        return totals

    def place(self, key: Key, life: KvDemand) -> None:
        """Count an attempt which joins at an unknown step. The caller has asked `fits`, or means to go beyond the pool."""
        self._add(key, _Entry(self._row(life, self.steps, NEVER), life.whole(self.block_size), life, running=False))

    def adopt(self, key: Key, kv_blocks: int) -> None:
        """Count what a worker already held when it registered: these blocks, until it lets go. May go beyond the pool."""
        self._add(key, _Entry(_Row(NEVER, 0, 0, 0, kv_blocks, self._new_id()), kv_blocks, None, running=False))

    def joined(self, key: Key, step: int) -> None:
        """The attempt joined the batch after that step. Idempotent; what is not pending here is left as it is."""
        entry = self._entries.get(key)
        if entry is None or entry.running or entry.life is None:
            return
        self._run(key, entry.life, step)

    def may_share(self, key: Key, parts: Mapping[int, int]) -> bool:
        """Whether the attempt's prompt has as many blocks as these parts."""
        entry = self._entries.get(key)
        if entry is None or entry.life is None:
            return True
        return sum(parts.values()) <= entry.life.prompt_tokens // self.block_size

    def shares(self, key: Key, parts: Mapping[int, int]) -> bool:
        """Note that the attempt holds these blocks until it ends. Returns False if its prompt has fewer blocks."""
        if not self.may_share(key, parts):
            return False
        entry = self._entries.get(key)
        if entry is not None and entry.life is not None:
            self._cover(key, self._shared.hold(key, parts, entry.row.end))
        return True

    def reached(self, steps: int) -> list[Key]:
        """The worker has begun this many steps; every attempt that joined by then has been named. Returns those that have just
        outlived what they were counted with."""
        self.steps, outlived = max(self.steps, steps), []
        while self._short and self._short[0][0] < self.steps:
            _, row_id, key = heappop(self._short)
            entry = self._entries.get(key)
            if entry is not None and entry.row.row_id == row_id:
                assert entry.life is not None
                longer = entry.life._replace(expected=2 * entry.life.counted + 1)
                self._run(key, longer, entry.row.end - entry.life.counted)
                outlived.append(key)
        self.outlived.update(outlived)
        return outlived

    def demand(self, key: Key) -> KvDemand | None:
        """Returns the demand that an attempt is counted with; None if it was adopted and only its blocks are known."""
        return self._entries[key].life

    def release(self, key: Key) -> bool:
        """The worker holds nothing more for this attempt. False if there is none, as when a message is repeated."""
        if key not in self._entries:
            return False
        self._shared.release(key)
        self._take_out(key)
        self.outlived.discard(key)
        return True

    def _take_out(self, key: Key) -> None:
        entry = self._entries.pop(key)
        self.wholes -= entry.whole
        if self._has_rows and self.wholes * 2 <= self.kv_blocks:
            self._has_rows, self._peak = False, None
            self._ends.clear()
            self._ids.clear()
        elif self._has_rows:
            self._drop_row(entry.row)

    def held_now(self, key: Key) -> int:
        """Blocks the attempt holds at the most at the step the worker is known to have reached."""
        return self._entries[key].row.at(self.steps, self.block_size)

    def forwarded(self, key: Key) -> int:
        """Returns the tokens that one choice of a running attempt has certainly emitted, without its first one."""
        entry = self._entries[key]
        if not entry.running or entry.life is None:
            return 0
        joined = entry.row.cap - entry.life.counted
        return max(min(self.steps - joined - 1, entry.life.left), 0)  # the last step begun may not be over

    def _run(self, key: Key, life: KvDemand, step: int) -> None:
        before = self._entries[key]
        self._take_out(key)
        row = self._row(life, step, step + life.counted, before.covered)
        whole = life.whole(self.block_size) - before.covered
        self._add(key, _Entry(row, whole, life, running=True, covered=before.covered))
        self._shared.moved(key, row.end)
        if life.counted < life.left:
            heappush(self._short, (row.end, row.row_id, key))
            if len(self._short) > 2 * len(self._entries) + 64:
                self._short = [short for short in self._short if self._is_current(short)]
                heapify(self._short)

    def _is_current(self, short: tuple[int, int, Key]) -> bool:
        entry = self._entries.get(short[2])
        return entry is not None and entry.row.row_id == short[1]

    def _settle(self) -> None:
        """Count shared blocks anew, if the attempts that count them may have changed."""
        if not self._shared.stale:
            return
        for key, more in self._shared.settle().items():
            self._cover(key, more)

    def _cover(self, key: Key, more: int) -> None:
        """Count `more` of an attempt's blocks with other attempts."""
        if not more:
            return
        entry = self._entries[key]
        row = entry.row._replace(base=entry.row.base - more)
        self.wholes -= more
        self._entries[key] = entry._replace(row=row, whole=entry.whole - more, covered=entry.covered + more)
        if self._has_rows:
            self._drop_row(entry.row)
            self._add_row(row)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _row(self, life: KvDemand, start: int, end: int, covered: int = 0) -> _Row:
        """Returns an attempt's row. It is too low at steps before `start`, which are in the past and never read."""
        base = (life.prompt_tokens // self.block_size) * (1 - life.choices) - covered
        offset = life.prompt_tokens - start + self.block_size - 1
        return _Row(end, start + life.counted, offset, life.choices, base, self._new_id())

    def _blocks(self, row: _Row, rows: int) -> Ints:
        """One attempt's blocks at the ends of the first `rows` rows, its own end left out of account."""
        blocks: Ints = np.minimum(self._table[_END, :rows], row.cap)
        blocks += row.offset
        blocks //= self._divisor
        if row.choices != 1:
            blocks *= row.choices
        if row.base:
            blocks += row.base
        return blocks

    def _total_at(self, step: int, first: int) -> int:
        """Returns T at a step after the ends of all rows before `first`."""
        _, cap, offset, choices, base, _ = self._table[:, first : len(self._ends)]
        blocks = np.minimum(cap, step)
        blocks += offset
        blocks //= self._divisor
        return int(blocks @ choices) + int(base.sum())

    def _add(self, key: Key, entry: _Entry) -> None:
        assert key not in self._entries, key
        self._entries[key] = entry
        self.wholes += entry.whole
        if self._has_rows:
            self._add_row(entry.row)

    def _drop_row(self, row: _Row) -> None:
        at = self._ids.index(row.row_id, bisect_left(self._ends, row.end))
        upto, rows = bisect_right(self._ends, row.end, at), len(self._ends)
        self._table[_TOTAL, :upto] -= self._blocks(row, upto)
        self._table[:, at : rows - 1] = self._table[:, at + 1 : rows]
        del self._ends[at], self._ids[at]
        self._peak = None

    def _add_row(self, row: _Row) -> None:
        rows = len(self._ends)
        if rows == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
        at = bisect_right(self._ends, row.end)
        # A row with the same end has the same total. Else sum the rows that end later.
        same = at > 0 and self._ends[at - 1] == row.end
        total = int(self._table[_TOTAL, at - 1]) if same else self._total_at(row.end, at) if at < rows else 0
        if at:
            self._table[_TOTAL, :at] += self._blocks(row, at)
        if at < rows:
            self._table[:, at + 1 : rows + 1] = self._table[:, at:rows]
        total += row.at(row.end, self.block_size)
        self._table[:, at] = (row.end, row.cap, row.offset, row.choices, row.base, total)
        self._ends.insert(at, row.end)
        self._ids.insert(at, row.row_id)
        self._peak = None
